"""The Backend protocol: what the engine calls on a device. Each implementation is a module or package beside this file.

A backend owns weights, adapters, gradients, optimizer state and frozen sampler versions; it knows no SQL and no HTTP.
The engine calls it from one thread, never concurrently. Errors: a `UserError` in a result list fails that one request;
any other exception means that nothing changed, and MemoryError that the work does not fit. Another thread may write a
`Capture` meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tinsmith.errors import UserError
from tinsmith.samplers import Sampler
from tinsmith.types import LoraSpec, OptimStep, Pass, PassResult

T = TypeVar("T")

MicroBatches = Generator[None, None, list[PassResult | UserError]]
"""A packed step: it pauses between micro-batches and returns the outcome of each pass. `close` aborts the step."""


def run_to_end(parts: Generator[None, None, T], on_pause: Callable[[], None] | None = None) -> T:
    """Run a generator to its end and return its result. `on_pause` is called at each pause; an exception from it aborts
    the work.
    """
    with closing(parts):
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value
            if on_pause:
                on_pause()


@dataclass(frozen=True, slots=True)
class Capture:
    """A model or version as it was when it was captured. `write` writes it into a directory, from any thread."""

    num_bytes: int
    write: Callable[[Path], None]


class RunningProfile(Protocol):
    """A profile that a backend writes; it is used between two steps."""

    @property
    def is_full(self) -> bool:
        """Whether it has all the files that it may have, or can have."""
        ...

    def stop(self) -> Sequence[Path]:
        """End it; returns its files. A repetition returns them again. Raises UserError if one could not be made."""
        ...


class Backend(Protocol):
    """One base model on one device (or group of devices), with any number of adapters."""

    @property
    def sampler(self) -> Sampler:
        """The sampler that shares this backend's base weights and its published versions."""
        ...

    def create_model(self, model_id: str, spec: LoraSpec, optimizer_type: str = "adamw") -> None:
        """Add a fresh adapter: A seeded, B zero, no gradient, step 0. Raises UserError on a bad rank or optimizer."""
        ...

    def unload_model(self, model_id: str) -> None:
        """Drop an adapter with its gradient and optimizer state. Unknown ids are ignored."""
        ...

    def has_model(self, model_id: str) -> bool: ...

    @property
    def model_budget_bytes(self) -> int:
        """The most bytes that all models in training may use together."""
        ...

    def model_bytes(self, model_id: str) -> int:
        """Bytes of a model in training."""
        ...

    def memory_use(self) -> Mapping[str, int]:
        """Bytes of device memory by holder, and the memory `budget` if one is set."""
        ...

    def sleep(self) -> None:
        """Leave the device to another process: everything moves to host memory, bit for bit, until `wake_up`.

        Meanwhile `run_passes`, `optim_step` and the sampler must not be used; all else works. On a CPU nothing moves.
        All or nothing: raises MemoryError.
        """
        ...

    def wake_up(self) -> None:
        """Take the device back. All or nothing: raises MemoryError."""
        ...

    def start_profile(self, directory: Path) -> RunningProfile:
        """Write traces of the next steps into `directory`, which is created. Raises UserError if this backend cannot
        trace, or traces already.
        """
        ...

    def run_passes(self, passes: Sequence[Pass]) -> MicroBatches:
        """Run all passes in one packed step; passes that are not forward_only add to their adapter's gradient.

        It pauses between micro-batches, so that samples are decoded during a long step; no model may change meanwhile.
        All or nothing: if it raises or is closed, no gradient has changed.
        """
        ...

    def optim_step(self, steps: Sequence[OptimStep]) -> list[dict[str, float] | UserError]:
        """Apply its own optimizer to each named adapter (distinct model_ids), then zero its gradient. All or nothing:
        if it raises, no adapter and no gradient has changed.
        """
        ...

    def capture(self, model_id: str) -> Capture:
        """The model as it is now, in the format of a stacked `save` with its optimizer's state."""
        ...

    def capture_version(self, version_id: str) -> Capture:
        """A version, for `load_version`: in PEFT's format with stacked experts."""
        ...

    def version_bytes(self, version_id: str) -> int:
        """Bytes of a version's weights on a device."""
        ...

    def save(self, model_id: str, directory: Path, *, optimizer: bool, stacked: bool = False) -> None:
        """Write the adapter in PEFT's format into a directory; with `optimizer`, also `optimizer.safetensors` and the
        gradient that has accumulated, if any. `stacked`: experts in the format of Tinker's exports, a fraction of
        PEFT's size.
        """
        ...

    def load(
        self, model_id: str, spec: LoraSpec, directory: Path, *, optimizer: bool, optimizer_type: str = "adamw"
    ) -> None:
        """Create an adapter from a saved one; with `optimizer`, also its optimizer state and saved gradient. Raises
        UserError if `optimizer` is set and the directory has no optimizer state.
        """
        ...

    def publish(self, model_id: str, version_id: str) -> None:
        """Copy the adapter's current weights into the version `version_id`, replacing it if it exists."""
        ...

    def load_version(self, version_id: str, directory: Path) -> None:
        """Create a version from a saved adapter (PEFT format)."""
        ...

    def has_version(self, version_id: str) -> bool: ...

    def drop_version(self, version_id: str) -> None:
        """Drop a version once no running sample uses it. Unknown ids are ignored."""
        ...
