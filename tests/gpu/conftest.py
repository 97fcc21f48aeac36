"""Nothing here is collected unless TEST_DEVICE says where to compute (`make test-gpu`)."""

from __future__ import annotations

import pytest

from gpu.device import DEVICE, NAMED, ON_CUDA

collect_ignore_glob = [] if NAMED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def device_is_there() -> None:
    import torch

    if ON_CUDA and not torch.cuda.is_available():
        pytest.exit(f"TEST_DEVICE is {DEVICE!r}, and torch {torch.__version__} finds no CUDA device", 1)
