"""The torch backend: one frozen Hugging Face model, any number of adapters, training and sampling in one process.

`model` and `lora` hold the model; `attention` computes what a row may see; `batch`, `loss` and `trainer` make a step;
`optim` applies it; `checkpoint` writes and reads files; `memory` has the memory budget; `backend` is what the engine
drives.
"""

from tinsmith.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
