"""The Python client of bulk jobs."""
