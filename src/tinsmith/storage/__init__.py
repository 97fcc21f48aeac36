"""Objects and sealed directories by name: on a local disk, in S3 or in Google Cloud Storage."""
