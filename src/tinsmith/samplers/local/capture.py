"""How a run of kernels of fixed shapes at fixed addresses is captured, to be launched again without Python.

A `Capture` is given a run and hands back its launch. The run reads and writes tensors that are there before it, and
makes its result; whoever launches it has changed what is in those tensors, never where they are. What a run reads from
Python (numbers, shapes, which tensors) is as it was at the capture, for ever: on CUDA a launch is the kernels alone.
So a run must look at nothing that lies on the device, and must do no harm when it is done several times over.

`plain` captures nothing and runs it again: for CPUs, where the tests hold it against a recording of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[[], Tensor]
"""Its result is overwritten by the next launch of any run that was captured by the same `Capture`."""

Capture = Callable[[Run], Run]

WARM_UPS = 2
"""Runs before a capture, in which libraries load kernels and take their workspaces: neither may be captured."""


def plain(run: Run) -> Run:
    return run


class CudaCapture:
    """CUDA graphs that share one pool of memory: at any time only one of them runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            self._warm_up(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads copy and allocate meanwhile; what they do is not captured, and is no mistake.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                result = run()

        def launch() -> Tensor:
            graph.replay()
            return result

        return launch

    def _warm_up(self, run: Run) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)


def capture_for(device: torch.device) -> Capture | None:
    """None where capturing gains nothing."""
    return CudaCapture(device) if device.type == "cuda" else None
