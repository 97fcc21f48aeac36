"""The stores: one module for each noun (futures, sessions, models, checkpoints, files, usage, ...). SQL only."""
