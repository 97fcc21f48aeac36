"""Bulk jobs: a function over every row of a data set, on a pool of workers, each result written exactly once."""

from __future__ import annotations

from tinsmith.batch.protocols import InputReader, JobSpec, OutputWriter

__all__ = ["InputReader", "JobSpec", "OutputWriter"]
