"""The torch backend: one frozen Hugging Face model, any number of adapters, training and sampling in one process.

`model` and `lora` hold the model; `attention` defines what a row may attend to; `batch`, `loss` and `trainer` run a
step; `optim` applies it; `checkpoint` reads and writes files; `memory` manages the memory budget; `backend` is what the
engine calls.
"""

from tinsmith.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
