"""The server's side of bulk jobs: their state, their workers, dispatch and commits."""
