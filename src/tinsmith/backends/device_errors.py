"""How devices and their libraries report errors. Imports no torch: exceptions are recognised by class name and text.

Memory that runs out is reported by torch's own classes, by MemoryError, and by CUDA libraries and the CPU allocator as
a RuntimeError. A device fault (an illegal access, a failed assertion in a kernel, an error of cuBLAS, cuDNN or NCCL)
leaves a CUDA context that refuses all further work, so the process must end.
"""

from __future__ import annotations

MEMORY_SIGNS = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED", "not enough memory")

DEVICE_SIGNS = (
    "CUDA error",
    "CUDA driver error",
    "CUBLAS_STATUS",
    "CUSPARSE_STATUS",
    "CUSOLVER_STATUS",
    "cuDNN error",
    "CUDNN_STATUS",
    "NCCL error",
    "NCCL Error",
    "Triton Error [CUDA]",
    "HIP error",
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
)

_MEMORY_CLASSES = {"OutOfMemoryError"}
_DEVICE_CLASSES = {"AcceleratorError", "CudaError", "DistBackendError"}


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or _has_class(error, _MEMORY_CLASSES):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)


def is_device_fault(error: BaseException) -> bool:
    """Whether the device, or a library on it, failed for another reason than memory."""
    if is_out_of_memory(error):
        return False
    if _has_class(error, _DEVICE_CLASSES):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in DEVICE_SIGNS)


def _has_class(error: BaseException, names: set[str]) -> bool:
    return any(base.__name__ in names and base.__module__.startswith("torch") for base in type(error).__mro__)
