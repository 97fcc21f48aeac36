"""Which exceptions are answers, and which end an engine: one test for each row of the table in `engine.faults`."""

from __future__ import annotations

import httpx
import pytest
import torch
from sqlalchemy import exc

from tinsmith.backends.device_errors import is_device_fault
from tinsmith.cluster.engines import LeaseLostError
from tinsmith.engine.faults import EngineFaultError, Fault, answer_of, classify
from tinsmith.engine.settling import IterationFailedError
from tinsmith.errors import (
    EngineFailedError,
    LostStateError,
    NonFiniteGradientError,
    RankFailedError,
    RanksLostError,
    RequestError,
    UserError,
)
from tinsmith.storage.stores import UnreachableError
from tinsmith.types import Pending


class AcceleratorError(RuntimeError):
    """torch.AcceleratorError, which Python code cannot make."""

    __module__ = "torch"


ROWS = [
    (UserError("data[0] is too long"), Fault.USER),
    (RequestError("seed", "CUDA error is only a word of this message"), Fault.USER),
    (NonFiniteGradientError(), Fault.USER),
    (LostStateError("gone"), Fault.REFUSAL),
    (EngineFailedError("the sampling engine answered nothing"), Fault.REFUSAL),
    (MemoryError("no memory"), Fault.MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Fault.MEMORY),
    (RuntimeError("CUDA error: out of memory"), Fault.MEMORY),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Fault.MEMORY),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"), Fault.MEMORY),
    (OSError(28, "No space left on device"), Fault.STORAGE),
    (UnreachableError("the bucket does not answer"), Fault.STORAGE),
    (ConnectionResetError(), Fault.STORAGE),
    (TimeoutError(), Fault.STORAGE),
    (httpx.ReadTimeout("slow"), Fault.STORAGE),
    (exc.OperationalError("SELECT", None, Exception("the connection was lost")), Fault.STORAGE),
    (AcceleratorError("CUDA error: an illegal memory access was encountered"), Fault.DEVICE),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), Fault.DEVICE),
    (RuntimeError("CUDA error: device-side assert triggered"), Fault.DEVICE),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), Fault.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), Fault.DEVICE),
    (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:2077, unhandled cuda error"), Fault.DEVICE),
    (RuntimeError("Triton Error [CUDA]: misaligned address"), Fault.DEVICE),
    (torch.distributed.DistBackendError("NCCL error: remote process exited"), Fault.DEVICE),
    (RanksLostError("rank 1 was killed by signal 9"), Fault.DEVICE),
    (RankFailedError("KeyError: 'a'"), Fault.BUG),
    (AssertionError(), Fault.BUG),
    (IndexError("list index out of range"), Fault.BUG),
    (KeyError("layer"), Fault.BUG),
    (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), Fault.BUG),
    (ValueError("a word about CUDA error"), Fault.BUG),
    (NotImplementedError(), Fault.BUG),
    (KeyboardInterrupt(), Fault.EXIT),
    (SystemExit(1), Fault.EXIT),
    (GeneratorExit(), Fault.EXIT),
    (LeaseLostError("declared dead"), Fault.EXIT),
    (IterationFailedError("the database"), Fault.EXIT),
    (EngineFaultError(Fault.DEVICE, "an illegal access"), Fault.DEVICE),
]


@pytest.mark.parametrize(("error", "fault"), ROWS, ids=lambda value: repr(value)[:60])
def test_every_exception_has_its_row(error: BaseException, fault: Fault) -> None:
    assert classify(error) is fault
    assert fault.is_fatal == (fault in (Fault.DEVICE, Fault.BUG))


def test_the_accelerators_own_error_is_a_device_fault() -> None:
    """Its class is part of torch, with the name and module that are looked for."""
    assert (torch.AcceleratorError.__name__, torch.AcceleratorError.__module__) == ("AcceleratorError", "torch")
    assert issubclass(torch.AcceleratorError, RuntimeError) and is_device_fault(AcceleratorError("unknown"))


def test_only_what_is_not_fatal_becomes_an_answer() -> None:
    request = Pending(1, "m:1", "alice", "s", "forward_backward", "pending", "m", None, 1, 7, 0.0)
    assert answer_of(refused := UserError("no"), request) is refused
    memory_error = answer_of(torch.OutOfMemoryError("CUDA out of memory"), request)
    assert memory_error.category == "user" and "7 tokens does not fit into the engine's memory, even alone" in str(
        memory_error
    )
    assert "no space" in str(answer_of(OSError(28, "no space"), request))
    for error in (AssertionError("ours"), RuntimeError("CUDA error: unspecified launch failure")):
        with pytest.raises(EngineFaultError) as raised:
            answer_of(error, request)
        assert raised.value.__cause__ is error and type(error).__name__ in str(raised.value)
