"""A replacement for SGLang's CUDA kernels on a machine without CUDA. Any name can be imported; calling one raises
RuntimeError.

Requests for pinned memory, which SGLang's LoRA layers make on every device, get ordinary memory. Only the SGLang
process that a test starts on a CPU has this directory on its path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_arguments: object, **_options: object) -> object:
        raise RuntimeError(f"sgl_kernel.{name} needs CUDA")

    return refuse


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def create_pageable(*arguments: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return create(*arguments, **options)

    return create_pageable


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "empty_strided"):
    setattr(torch, _name, _without_pinning(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda self, *_arguments: self  # pyright: ignore[reportAttributeAccessIssue]
