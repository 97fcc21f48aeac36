"""The torch backend: one frozen Hugging Face model, any number of adapters, training and sampling in one
process.

base and lora hold the model; attention says what a row may see; packing, head, losses and trainer make a
step; adamw applies it; files keeps it; backend is what the engine drives.
"""

from tinsmith.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
