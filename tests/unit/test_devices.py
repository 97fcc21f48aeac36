"""Kinds of devices: which one is chosen, what is refused, and a device that is neither a CPU nor CUDA.

No Apple or Intel GPU is at hand: that a kind is chosen, measured and refused is tested with torch's modules replaced,
and what it computes on a simulated device (`support.plain_device`).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from tinsmith.backends.torch.trial import refuse_missing_operations
from tinsmith.engine import __main__ as engine_main
from tinsmith.engine.layouts import read_memory as read_slots
from tinsmith.errors import SettingsError
from tinsmith.runtime import devices
from tinsmith.runtime.devices import KINDS, choose_device, count_unused_bytes, free_bytes, read_memory
from tinsmith.settings import Settings

GIB = 2**30
SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> SimpleNamespace:
    """Replace torch's module of a device."""
    defaults = {"is_available": lambda: True, "device_count": lambda: 1}
    module = SimpleNamespace(**(defaults | functions))
    monkeypatch.setattr(torch, "get_device_module", lambda asked: module if asked == name else pytest.fail(asked))
    return module


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:1"])
def test_a_device_that_this_torch_lacks_is_refused_by_name(name: str) -> None:
    if torch.get_device_module(name.partition(":")[0]).is_available():
        pytest.skip("it is there")
    with pytest.raises(SettingsError, match=rf"device '{name}' is unavailable: PyTorch .* 'auto' or 'cpu'"):
        choose_device(name)
    with pytest.raises(SettingsError, match="unavailable"):
        engine_main.check_device(Settings(device=name))


@pytest.mark.parametrize("device", ["gpu", "mps:0", "xpu:x", "meta"])
def test_settings_take_no_other_names(device: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        Settings(device=device)
    with pytest.raises(SettingsError, match="choose one of 'auto', 'cpu', 'cuda'"):
        choose_device("meta")


def test_a_device_is_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    replace_module(monkeypatch, "xpu", device_count=lambda: 2)
    assert [choose_device(name) for name in ("xpu", "xpu:1")] == ["xpu", "xpu:1"]
    with pytest.raises(SettingsError, match=r"'xpu:2', and torch .* finds 2 devices of the kind 'xpu' here"):
        choose_device("xpu:2")
    assert choose_device("auto") == "cpu"


def test_memory_is_what_the_driver_or_else_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_host_memory", lambda: (5 * GIB, 16 * GIB))
    assert read_memory("cpu") == (5 * GIB, 16 * GIB) and count_unused_bytes(torch.device("cpu")) == 0
    replace_module(monkeypatch, "xpu", mem_get_info=lambda device: (3, 8), memory_reserved=lambda device: 7,
                   memory_allocated=lambda device: 5)  # fmt: skip
    assert read_memory("xpu:1") == (3, 8) and count_unused_bytes(torch.device("xpu")) == 2
    assert engine_main._device_memory(Settings(device="xpu"), 1) == (3, False)
    assert read_slots(Settings(device="xpu")) == ([3], [8], False)

    def refuse(device: object) -> tuple[int, int]:
        raise RuntimeError("The device does not support querying the available free memory")

    replace_module(monkeypatch, "xpu", mem_get_info=refuse)
    assert free_bytes("xpu") == 5 * GIB
    for used, free in ((GIB, 5), (10 * GIB, 2), (13 * GIB, 0)):
        replace_module(monkeypatch, "mps", recommended_max_memory=lambda: 12 * GIB,
                       driver_allocated_memory=lambda used=used: used)  # fmt: skip
        assert read_memory("mps") == (free * GIB, 12 * GIB)


def test_only_tested_kinds_have_more_than_plain_operations() -> None:
    assert [name for name, kind in KINDS.items() if kind.is_tested] == ["cpu", "cuda"]
    plain = devices.DeviceKind("")
    for kind in (kind for kind in KINDS.values() if not kind.is_tested):
        assert replace(kind, name="", has_float64=True, prefers_bfloat16=False) == plain


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device.\nMore text"),
        TypeError("Cannot convert a MPS Tensor to float64 dtype"),
    ],
)
def test_a_missing_operation_is_refused_with_its_name(error: Exception) -> None:
    text = str(error).partition("\n")[0]
    with (
        pytest.raises(SettingsError, match=r"device is 'mps', which lacks an operation .*use 'cpu'") as refused,
        refuse_missing_operations("mps"),
    ):
        raise error
    assert text in str(refused.value) and "More text" not in str(refused.value)
    with pytest.raises(MemoryError), refuse_missing_operations("mps"):
        raise MemoryError


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "support.plain_device", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.extended
@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "gpt_oss", "qwen3_5"])
def test_a_device_with_plain_operations_computes_what_a_cpu_does(arch: str) -> None:
    """A training loop with both optimizers, a checkpoint that is loaded again, and all kinds of samples."""
    ran = simulate(arch)
    assert ran.returncode == 0, ran.stderr
    differences = json.loads(ran.stdout.splitlines()[-1])
    assert len([name for name in differences if name.startswith("sample")]) > 30
    assert {name for name in differences if name.startswith("dimuon")}
    assert max(differences.values()) < 1e-3, differences


@pytest.mark.extended
@pytest.mark.parametrize("operation", ["rsqrt_", "_fused_adamw_", "index_copy_"])
def test_a_device_that_lacks_an_operation_of_any_stage_is_refused(operation: str) -> None:
    ran = simulate("qwen3", operation)
    assert ran.returncode and f"aten::{operation}' is not currently implemented" in ran.stderr.splitlines()[-1]
    assert "SettingsError" in ran.stderr.splitlines()[-1]


MAY_NAME_DEVICES = {
    "runtime/devices.py": "the place",
    "backends/torch/attention.py": "whether cuDNN suits a CUDA device",
    "backends/torch/fp8.py": "the capability of a CUDA device",
    "backends/torch/moe.py": "the capability of a CUDA device",
    "backends/torch/host.py": "events of copies from pinned memory",
    "backends/torch/memory.py": "the settings of CUDA's allocator",
    "backends/torch/profiling.py": "ranges of NVTX and the profiler's activities",
    "backends/torch/head_kernels.py": "Triton",
    "backends/torch/state_kernels.py": "Triton",
    "samplers/local/paged_kernel.py": "Triton",
    "samplers/local/decode_graphs.py": "CUDA's graphs",
    "backends/torch/custom_loss.py": "whether a client's tensor is in memory",
    "plan/measurement.py": "measurements of a CPU or a CUDA device",
    "engine/__main__.py": "several GPUs of one engine, which are CUDA devices",
    "cli/doctor.py": "the names of the GPUs",
    "cli/plan.py": "GPUs that a plan is for",
    "cli/rank.py": "ranks on GPUs",
}
"""Modules that use torch.cuda, and for what."""


def list_uses_of_names(tree: ast.AST) -> list[int]:
    """Lines that use torch.cuda, compare a device's type, or ask whether a tensor is on a kind of device."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_module = (
                isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in KINDS.keys() - {"cpu"}
            )
            if is_module or node.attr in ("is_cuda", "is_cpu", "is_mps", "is_xpu"):
                lines.append(node.lineno)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "type":
            lines += [x.lineno for x in node.comparators if isinstance(x, ast.Constant) and x.value in KINDS]
    return lines


def test_devices_are_told_apart_in_one_place() -> None:
    uses = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("backends/distributed/") and (lines := list_uses_of_names(ast.parse(path.read_text()))):
            uses[name] = lines
    assert {name: lines for name, lines in uses.items() if name not in MAY_NAME_DEVICES} == {}
    assert MAY_NAME_DEVICES.keys() <= uses.keys(), "a module that no longer names one needs no leave"
