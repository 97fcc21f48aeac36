"""Inputs and outputs of bulk jobs: one reader and one writer for each format."""
