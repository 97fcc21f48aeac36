"""Observability: logs, metrics, traces and timelines."""
