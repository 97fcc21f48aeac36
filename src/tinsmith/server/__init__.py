"""The server process: its construction, start, stop and janitor."""
