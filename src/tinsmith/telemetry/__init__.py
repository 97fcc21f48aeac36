"""Observability for operators: logs, metrics, traces and timelines. Changes nothing in the service."""
