"""A CUDA graph for CPUs: each kernel of a run with the tensors that it was given, run again in the same order on the
same memory.

Nothing else survives from the recording: what Python decided then is decided for ever, a tensor that was made anew for
a later step is not seen, and whatever looks at numbers on the way is refused, as it is on a GPU. Results of replayed
kernels go where they went at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinsmith.samplers.local.cuda_graphs import Run

LOOKS = ("_local_scalar_dense", "item", "nonzero", "lift_fresh", "equal", "is_nonzero", "masked_select", "unique")
"""Kernels that a GPU's host must wait for, or that bring numbers along from the host."""


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        name = func.overloadpacket.__name__
        if any(name.startswith(look) for look in LOOKS):
            raise RuntimeError(f"{name} looks at what a graph only computes later")
        result = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, list(tensors(result))))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self.kernels:
            for old, new in zip(results, tensors(func(*args, **kwargs)), strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def tensors(result: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


class Recordings:
    """A Capture that counts: `replays` of any of its runs."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        self.captures += 1
        run()  # a run may be done several times over
        recorder = Recorder()
        with recorder:
            result = run()
        with torch.inference_mode():
            result.fill_(float("nan"))  # a recording computes nothing

        def replay() -> Tensor:
            self.replays += 1
            with torch.inference_mode():
                recorder.replay()
            return result

        return replay
