"""Engines, samplers and batch workers as actors of a Ray cluster.

Ray places, starts and restarts processes and carries no data: their work is in the database and the storage, as on one
machine. `scaling` computes how many processes each role needs, `controller` reconciles the cluster with that, `shell`
keeps one process running, and only `cluster` imports Ray.
"""
