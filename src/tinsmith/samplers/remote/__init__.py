"""Sampling by an inference server: vLLM or SGLang."""
