"""Unmodified recipes of tinker-cookbook, run as commands against a live server on the torch backend."""
