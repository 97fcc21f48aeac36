"""The backends by name: the one place that imports them, and each only when it is asked for."""

from __future__ import annotations

from tinsmith.backends import Backend
from tinsmith.errors import SettingsError
from tinsmith.runtime.malloc import importing
from tinsmith.types import ModelShape


def preload() -> None:
    """Import what the torch backend takes seconds to import."""
    with importing():
        import tinsmith.backends.torch
        import tinsmith.samplers.local.engine  # noqa: F401


def load(name: str, shape: ModelShape, **options: str) -> Backend:
    """Make the backend called `name` for one base model. Options are the backend's own, as text."""
    if name == "torch":
        with importing():
            from tinsmith.backends.torch import TorchBackend

        return TorchBackend(shape, **options)
    if name == "sharded":
        with importing():
            from tinsmith.backends import distributed

        return distributed.load(shape, **options)
    if name == "full":
        with importing():
            from tinsmith.backends.full import FullBackend

        return FullBackend(shape, **options)
    if name == "fake":
        from tinsmith.backends.fake import FakeBackend

        return FakeBackend(shape, **options)
    raise SettingsError(f"backend {name!r} is unknown; choose 'torch', 'sharded', 'full' or 'fake'")
