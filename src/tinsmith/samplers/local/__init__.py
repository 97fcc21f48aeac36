"""Sampling in the engine's process: continuous batching over a paged KV cache, with any number of adapters."""
