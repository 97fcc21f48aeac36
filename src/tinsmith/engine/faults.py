"""What an exception during work on requests means: an answer, another attempt, or the end of the engine.

`classify` is the only place that decides. A wrong request, a refusal and a lack of memory are answers. Storage and the
database are tried again, or fail one request. Everything else is a fault: after an error of the device nothing more can
be computed, and a bug of ours may have left any state behind. A fault ends the engine's process as a kill would: its
supervisor starts another one, which replays, and `quarantine` finds a request that does this again and again.

| exception | fault |
|---|---|
| UserError, also that of a user's custom loss | USER |
| other TinsmithError, such as LostStateError | REFUSAL |
| MemoryError, torch.OutOfMemoryError, a RuntimeError about memory | MEMORY |
| OSError, errors of the database, of HTTP and of object stores | STORAGE |
| torch.AcceleratorError, errors of CUDA, cuBLAS, cuDNN and NCCL, RanksLostError | DEVICE |
| RankFailedError, and every other Exception | BUG |
| KeyboardInterrupt, SystemExit, a lost lease | EXIT |

Background work that answers no request (snapshots, files for samplers) is tried again after a bug, since it changes no
state; only a device fault there ends the engine.
"""

from __future__ import annotations

from enum import Enum

import structlog
from sqlalchemy.exc import SQLAlchemyError

from tinsmith.backends.device_errors import is_device_fault, is_out_of_memory
from tinsmith.errors import EngineFailedError, RankFailedError, RanksLostError, TinsmithError, UserError
from tinsmith.types import Pending

REMOTE_LIBRARIES = {"httpx", "obstore"}

log = structlog.get_logger()


class Fault(Enum):
    USER = "the request is wrong"
    REFUSAL = "the server cannot do this"
    MEMORY = "out of memory"
    STORAGE = "storage or database"
    DEVICE = "a fault of the device"
    BUG = "a bug"
    EXIT = "the end of the process"

    @property
    def is_fatal(self) -> bool:
        """Whether it ends the engine."""
        return self in (Fault.DEVICE, Fault.BUG)


class EngineFaultError(BaseException):
    """Ends the engine's process. Not an Exception, so handlers of request errors do not catch it; `__cause__` says
    why.
    """

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(f"{fault.value}: {reason}")
        self.fault = fault
        self.reason = reason

    @classmethod
    def of(cls, error: Exception) -> EngineFaultError:
        fault = cls(classify(error), describe(error))
        fault.__cause__ = error
        return fault


def classify(error: BaseException) -> Fault:
    if isinstance(error, EngineFaultError):
        return error.fault
    if not isinstance(error, Exception):
        return Fault.EXIT
    if isinstance(error, RanksLostError):
        return Fault.DEVICE
    if isinstance(error, RankFailedError):
        return Fault.BUG
    if isinstance(error, TinsmithError):
        return Fault.USER if isinstance(error, UserError) else Fault.REFUSAL
    if is_out_of_memory(error):
        return Fault.MEMORY
    if is_device_fault(error):
        return Fault.DEVICE
    is_remote = type(error).__module__.partition(".")[0] in REMOTE_LIBRARIES
    return Fault.STORAGE if is_remote or isinstance(error, OSError | SQLAlchemyError) else Fault.BUG


def describe(error: BaseException) -> str:
    """The class and the first line of an exception."""
    first_line = str(error).strip().partition("\n")[0][:300]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def answer_of(error: Exception, request: Pending) -> TinsmithError:
    """The answer of a request that ended with an exception, alone. Raises EngineFaultError if it is no answer."""
    fault = classify(error)
    if fault.is_fatal:
        raise EngineFaultError.of(error)
    if isinstance(error, TinsmithError):
        return error
    if fault is Fault.MEMORY:
        size = f" of {request.num_tokens} tokens" if request.num_tokens else ""
        return UserError(f"this {request.kind}{size} does not fit into the engine's memory, even alone: {error}")
    ids = {"request_id": request.request_id, "model_id": request.model_id, "tenant_id": request.tenant_id}
    log.error("a request failed", kind=request.kind, exc_info=error, **ids)
    return EngineFailedError(f"{request.kind} failed in the engine: {type(error).__name__}: {error}")
