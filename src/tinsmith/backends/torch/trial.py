"""A step of training and of sampling at start, on a device that was not tested.

`start_check` has compared the model's forward with transformers' own by then. This runs what follows a forward: the
loss, gradients, the optimizer, a published version and its samples. What a device cannot do is refused here, with the
operation's name, and not in a client's first request. Nothing is left behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tinsmith.backends import Backend, run_to_end
from tinsmith.errors import SettingsError, UserError
from tinsmith.types import AdamParams, Datum, LoraSpec, OptimStep, Pass, Sample, SamplingParams

NAME = "trial"
NUM_TOKENS = 8


def try_device(backend: Backend, device: str, vocab_size: int) -> None:
    """Raises SettingsError with the operation that the device lacks, or what is wrong with the results."""
    with refuse_missing_operations(device):
        backend.create_model(NAME, LoraSpec(8, seed=0))
        try:
            _try_training(backend, device, vocab_size)
            backend.publish(NAME, NAME)
            _try_sampling(backend, device)
        finally:
            backend.unload_model(NAME)
            backend.drop_version(NAME)


@contextmanager
def refuse_missing_operations(device: str) -> Iterator[None]:
    """Turn the errors of operations into SettingsError; those of memory pass unchanged."""
    try:
        yield
    except (SettingsError, MemoryError):
        raise
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError; a missing dtype a TypeError
        text = str(error).strip().partition("\n")[0][:300]
        raise SettingsError(
            f"device is {device!r}, which lacks an operation that training or sampling needs ({text}); use 'cpu', or a "
            "release of torch that has it"
        ) from error


def _try_training(backend: Backend, device: str, vocab_size: int) -> None:
    tokens_N = (np.arange(NUM_TOKENS + 1) % vocab_size).astype(np.int32)
    inputs = {"target_tokens": tokens_N[1:].astype(np.int64), "weights": np.ones(NUM_TOKENS, np.float32)}
    training = Pass(NAME, NAME, (Datum(tokens_N[:-1], inputs),), "cross_entropy", {}, False)
    (result,) = run_to_end(backend.run_passes([training]))
    if isinstance(result, UserError) or not math.isfinite(result.metrics["loss:sum"]):
        raise SettingsError(f"device is {device!r}, on which a step of training gives {result}")
    (outcome,) = backend.optim_step([OptimStep(NAME, NAME, AdamParams())])
    if isinstance(outcome, UserError):
        raise SettingsError(f"device is {device!r}, on which an optimizer step gives {outcome}")


def _try_sampling(backend: Backend, device: str) -> None:
    prompt_T = np.zeros(NUM_TOKENS, np.int32)
    backend.sampler.submit(Sample(NAME, NAME, prompt_T, 2, SamplingParams(max_tokens=2, seed=0, top_p=0.9)))
    while backend.sampler.has_work:
        for _, outcome in backend.sampler.step():
            if isinstance(outcome, UserError):
                raise SettingsError(f"device is {device!r}, on which a sample gives {outcome}")
