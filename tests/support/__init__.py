"""Shared by tests: live servers, in-process harnesses, references, tiny models, fault injection."""
