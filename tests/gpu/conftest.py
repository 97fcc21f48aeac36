"""Nothing is collected unless TEST_DEVICE says where to compute (`make test-gpu`). The last line is the verdict."""

from __future__ import annotations

import sys
from collections import Counter

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


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samplers, and those of tests that run at the same time, must fit."""
    monkeypatch.setattr("tinsmith.samplers.local.kv_cache.CUDA_SHARE", 0.01)
    monkeypatch.setattr("tinsmith.backends.torch.backend.TorchBackend._divide_memory", lambda _: None)


OUTCOMES: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        OUTCOMES[report.outcome if report.when == "call" or report.skipped else "failed"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    OUTCOMES["not run"] = session.testscollected - OUTCOMES.total()


def pytest_unconfigure(config: pytest.Config) -> None:
    import torch

    if NAMED and OUTCOMES:
        device_name = torch.cuda.get_device_name(DEVICE) if ON_CUDA else "a CPU, which shows nothing about a GPU"
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        sys.stdout.write(verdict(OUTCOMES, f"{device_name}, {versions}") + "\n")


def verdict(outcomes: Counter[str], device_name: str) -> str:
    verdict_word = "passed" if outcomes["passed"] and not outcomes["failed"] and outcomes["not run"] <= 0 else "FAILED"
    counts = ", ".join(f"{outcomes[name]} {name}" for name in ("passed", "failed", "skipped", "not run"))
    return f"{verdict_word}: {counts} on {device_name}"
