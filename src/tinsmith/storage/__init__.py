"""Bytes by name: files and sealed directories on a disk, in S3 or in Google Cloud Storage."""
