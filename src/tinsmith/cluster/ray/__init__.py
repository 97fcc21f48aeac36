"""Engines, samplers and batch workers as actors of a Ray cluster.

Ray places, starts and restarts processes and carries no data: as on one machine, work is in the database and the
storage. `scaling` computes the number of processes of each role, `controller` reconciles the cluster with it, `shell`
keeps one process running, and only `cluster` imports Ray.
"""
