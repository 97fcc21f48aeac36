"""A device `plain` that computes on the host behind torch's PrivateUse1 key: neither a CPU nor CUDA, without float64,
numpy, pinned memory or kernels. An operation on tensors of two devices is an error, as it is on a real one. What it
computes is a CPU's, so it shows which operations the code asks of such a device, and not how one rounds.

A process has one such device, so tests run this module as a program: `python -m support.plain_device ARCH [LACK]`
trains and samples a tiny model on it and on a CPU, and prints the largest differences. `LACK` is an operation that the
device lacks.
"""

# ruff: noqa: ANN401 - operations take and give anything

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tinsmith.runtime import devices

NAME = "plain"
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
"""The operations that take tensors of two devices."""

lacking: set[str] = set()
"""Names of operations that the device lacks."""


class PlainTensor(torch.Tensor):
    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PlainTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, *args, **(kwargs or {}))


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the host."""
    if op._schema.name.removeprefix("aten::") in lacking:
        raise NotImplementedError(f"The operator {op._schema.name!r} is not currently implemented for {NAME}")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    wrappers = {id(x.host): x for x in tensors if isinstance(x, PlainTensor)}
    others = [x for x in tensors if not isinstance(x, PlainTensor)]
    if wrappers and any(x.dim() for x in others) and op not in COPIES | INDEXED:
        raise RuntimeError(f"{op}: tensors are on {NAME} and on the host")
    target = kwargs.get("device")
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    args, kwargs = tree_map(lambda x: x.host if isinstance(x, PlainTensor) else x, (args, kwargs))
    is_for_host = target is not None and torch.device(target).type == "cpu"

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_for_host or any(x is other for other in others):
            return x
        if x.dtype == torch.float64:
            raise TypeError(f"{op}: {NAME} has no float64")
        return wrappers[id(x)] if id(x) in wrappers else PlainTensor(x)

    return tree_map(wrap, op(*args, **kwargs))


def register() -> None:
    """Add the device to torch and to the kinds of devices, with the properties of `mps`."""
    _setup_privateuseone_for_python_backend(NAME)
    every = torch.library.Library("_", "IMPL", "PrivateUse1")
    every.fallback(compute, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in ("_to_copy", "copy_"):
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, lambda *args, op=op, **kwargs: compute(op, *args, **kwargs))
    register.libraries = every, aten  # pyright: ignore[reportFunctionMemberAccess] - they end with their objects
    devices.KINDS = {**devices.KINDS, NAME: replace(devices.KINDS["mps"], name=NAME)}
    # Wrapped tensors have no version counter in inference mode.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else torch.enable_grad()  # pyright: ignore


def run(shape: Any, device: str) -> dict[str, np.ndarray]:
    """Everything that two steps of training and some samples give."""
    from tinsmith.backends import run_to_end
    from tinsmith.backends.torch import TorchBackend
    from tinsmith.types import (
        AdamParams,
        Datum,
        DimuonParams,
        LoraSpec,
        OptimStep,
        Pass,
        PassResult,
        Sample,
        SamplingParams,
    )

    backend = TorchBackend(shape, device=device, dtype="float32")
    values: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    optimizers = {"adamw": AdamParams(1e-2, grad_clip_norm=0.5), "dimuon": DimuonParams(1e-2)}
    for name, params in optimizers.items():
        backend.create_model(name, LoraSpec(4, seed=1), name)
        for step in range(2):
            data = []
            for length in (5, 19):
                tokens_N = rng.integers(0, shape.vocab_size, length + 1)
                weights_N = rng.normal(size=length).astype(np.float32)
                inputs = {"target_tokens": tokens_N[1:], "weights": weights_N}
                data.append(Datum(tokens_N[:-1].astype(np.int32), inputs))
            (result,) = cast(
                "list[PassResult]",
                run_to_end(backend.run_passes([Pass("p", name, tuple(data), "cross_entropy", {}, False)])),
            )
            (outcome,) = cast("list[dict[str, float]]", backend.optim_step([OptimStep("o", name, params)]))
            values |= {f"{name} {step} {index}": x for index, x in enumerate(result.logprobs)}
            values[f"{name} {step} metrics"] = np.array([result.metrics["loss:sum"], *outcome.values()])
        backend.publish(name, name)
    with tempfile.TemporaryDirectory() as directory:
        backend.capture("adamw").write(Path(directory))
        backend.load("again", LoraSpec(4, seed=1), Path(directory), optimizer=True)
        backend.publish("again", "again")
    params = [
        SamplingParams(max_tokens=6, temperature=0.0),
        SamplingParams(max_tokens=6, seed=3),
        SamplingParams(max_tokens=6, seed=4, top_k=5, top_p=0.8),
    ]
    for index, (version, sampling) in enumerate(zip(("adamw", "dimuon", "again"), params, strict=True)):
        backend.sampler.submit(
            Sample(str(index), version, rng.integers(0, shape.vocab_size, 21).astype(np.int32), 2, sampling,
                   prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2, topk_sample_logprobs=2)
        )  # fmt: skip
    while backend.sampler.has_work:
        for request_id, answer in backend.sampler.step():
            values |= {f"sample {request_id} {path}": x for path, x in _arrays(answer)}
    return values


def _arrays(answer: Any, path: str = "") -> Iterable[tuple[str, np.ndarray]]:
    """The arrays and numbers in a result."""
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, np.ndarray | int | float):
        yield path, np.asarray(answer, np.float64)
    elif isinstance(answer, tuple | list):
        for index, part in enumerate(answer):
            yield from _arrays(part, f"{path}.{index}")
    elif hasattr(answer, "__slots__"):
        for name in answer.__slots__:
            yield from _arrays(getattr(answer, name), f"{path}.{name}")


def main(arch: str, *operations: str) -> None:
    from support import tiny_models

    register()
    with tempfile.TemporaryDirectory() as directory:
        shape = tiny_models.make(Path(directory), arch)
        lacking.update(operations)
        actual = run(shape, NAME)
        expected = run(shape, "cpu")
    assert actual.keys() == expected.keys()
    differences = {
        name: float(np.nan_to_num(np.abs(actual[name] - expected[name])).max(initial=0.0)) for name in expected
    }
    sys.stdout.write(json.dumps(differences) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
