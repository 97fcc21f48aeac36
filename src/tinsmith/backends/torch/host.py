"""Copies between the host and the device.

`upload` copies an array to the device. On devices that copy from pinned memory it does not block the host. `Readback`
copies results to the host and waits for the device once for any number of tensors; `read` does so at once. A step
uploads what it needs and reads once, at its end or later. On a CPU both are views where possible.

Between steps, `host_copies` and `FrozenStores` move weights and state out of the device for another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.runtime.devices import kind_of

Number = TypeVar("Number", bound=np.generic)


def upload(array: npt.NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array on the device, in `dtype` if given. The array must not change before the step ends."""
    # Converted on the host: a copy that also converts would block.
    staged = torch.from_numpy(array).to(dtype=dtype)
    return staged.pin_memory().to(device, non_blocking=True) if kind_of(device).pins_memory else staged.to(device)


def upload_all(arrays: Sequence[npt.NDArray[Number]], device: torch.device) -> list[Tensor]:
    """Upload one-dimensional arrays of one dtype in one copy."""
    return list(upload(np.concatenate(arrays), device).split([len(array) for array in arrays]))


class Readback:
    """The values of tensors on one device, on their way to the host in one copy. bfloat16 is not supported."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        if len(tensors) == 1:
            self._concatenated = tensors[0]
        else:  # as bytes, so that values are not converted
            self._concatenated = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        self._copy_event: torch.cuda.Event | None = None
        if kind_of(self._concatenated.device).pins_memory:
            self._concatenated = self._concatenated.to("cpu", non_blocking=True)
            # Of the tensors' device, which need not be this thread's current one.
            self._copy_event = torch.cuda.Event()
            self._copy_event.record(torch.cuda.current_stream(tensors[0].device))

    def values(self) -> list[npt.NDArray[Any]]:
        """With the tensors' shapes and dtypes. Waits for the copy, not for work that was queued after it."""
        if self._copy_event is not None:
            self._copy_event.synchronize()
        concatenated = self._concatenated.cpu().numpy()
        if len(self._tensors) == 1:
            return [concatenated]
        bounds = pairwise(accumulate((tensor.nbytes for tensor in self._tensors), initial=0))
        return [
            concatenated[start:stop].view(_NUMPY[tensor.dtype]).reshape(tensor.shape)
            for (start, stop), tensor in zip(bounds, self._tensors, strict=True)
        ]


def read(*tensors: Tensor) -> list[npt.NDArray[Any]]:
    """The values of tensors, after waiting for all work that leads to them."""
    return Readback(*tensors).values()


_NUMPY = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, pinned if they come from a GPU. Waits once for all of them."""
    copies = []
    for tensor in tensors:
        pins = kind_of(tensor.device).pins_memory
        host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
        copies.append(host_copy.copy_(tensor, non_blocking=pins))
    _wait_for_copies({tensor.device for tensor in tensors})
    return copies


class SideStream:
    """Copies to the host, from any thread, of tensors that are complete once the device has done its work up to now.
    They run on a stream of their own, beside work that is queued later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if kind_of(device).pins_memory:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_apart(self) -> bool:
        """Whether there is such a stream; elsewhere copies wait for the device."""
        return self._event is not None

    @contextmanager
    def use(self) -> Iterator[None]:
        """All copies in the block are complete at its end, so that the memory of what was copied may be used again."""
        if self._event is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()


class FrozenStores:
    """The memory of tensors that never change, such as a base model's weights: on the device, or only on the host.

    Tensors and views of them stay valid objects; between `release` and `restore` their values must not be used. The
    copies on the host are made once and kept.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        stores = (tensor.untyped_storage() for tensor in tensors)
        # One for tied weights and views. Weights that a CPU reads from the file as they are have no memory to free.
        self._stores = list({store._cdata: store for store in stores if store.resizable()}.values())
        self._copies: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """What is on the device."""
        return sum(store.nbytes() for store in self._stores)

    def release(self) -> None:
        """Free the device memory. All or nothing: raises MemoryError or RuntimeError if the host has no room."""
        self._copies = self._copies or host_copies([_bytes_of(store) for store in self._stores])
        self._drop()

    def restore(self) -> None:
        """Allocate the memory again and fill it with the same bytes. All or nothing; the same errors."""
        try:
            for store, copy in zip(self._stores, self._copies, strict=True):
                store.resize_(copy.nbytes)
                _bytes_of(store).copy_(copy, non_blocking=kind_of(store.device).pins_memory)
            self._wait()
        except BaseException:
            self._wait()
            self._drop()
            raise

    def _wait(self) -> None:
        _wait_for_copies({store.device for store in self._stores})

    def _drop(self) -> None:
        for store in self._stores:
            store.resize_(0)


def _bytes_of(store: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=store.device).set_(store)


def _wait_for_copies(devices: set[torch.device]) -> None:
    for device in devices:
        if kind_of(device).pins_memory:  # this stream's alone: work of others goes on
            torch.cuda.current_stream(device).synchronize()
