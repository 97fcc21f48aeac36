"""The server process: what it is made of, what it sweeps, and how it starts and ends."""
