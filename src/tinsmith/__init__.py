"""Tinsmith: the Tinker API on your own laptop, GPU or cluster."""

__version__ = "0.1.0"
