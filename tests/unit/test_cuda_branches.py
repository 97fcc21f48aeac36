"""Branches for CUDA beside the steps of test_fake_cuda.py: optimizer state on the host, quantised bases, recomputation,
and what depends on answers of the driver (mocked): capabilities, free memory, several devices.
"""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from support import tiny_models
from support.fake_cuda import DEVICE, FREE_BYTES, FakeCudaBackend, fake_cuda
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.distributed import backend as sharded
from tinsmith.backends.distributed import collectives
from tinsmith.backends.torch import attention, memory, moe, profiling
from tinsmith.backends.torch.backend import FITTING_TOKENS
from tinsmith.backends.torch.recompute import RECOMPUTE_SHARE
from tinsmith.backends.torch.trainer import DeterministicTrainer
from tinsmith.cli import doctor
from tinsmith.engine import __main__ as engine_main
from tinsmith.errors import SettingsError
from tinsmith.runtime import devices
from tinsmith.samplers.local import kv_cache
from tinsmith.settings import Settings
from tinsmith.types import AdamParams, ModelShape, OptimStep, Pass, PassResult, SamplingParams
from unit.test_fake_cuda import data, open_backend


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("options", [{"recompute": "on"}, {"quantize": "int8"}, {"quantize": "nf4"}])
def test_a_step_and_a_sample_read_once_with_any_option(qwen: ModelShape, options: dict[str, str]) -> None:
    with fake_cuda() as device:
        backend = open_backend(qwen, **options)
        device.strict, device.reads = True, 0  # codes are made on the host, at load
        passes = [Pass("a", "0", data(9, 4), "cross_entropy", {}, False), Pass("b", "2", data(30), "ppo", {}, False)]
        results = run_to_end(backend.run_passes(passes))
        assert all(isinstance(result, PassResult) for result in results), results
        assert device.reads == 1
        backend.sampler.submit(make_sample("s", make_prompt(9), SamplingParams(max_tokens=4), version_id="0/1"))
        backend.sampler.step()
        assert device.reads == 1, "the token is read a step later"


def test_optimizer_state_leaves_the_device_and_returns(qwen: ModelShape) -> None:
    with fake_cuda():
        backend = open_backend(qwen)
        run_to_end(backend.run_passes([Pass("a", "0", data(9), "cross_entropy", {}, False)]))
        backend.optim_step([OptimStep("o", "0", AdamParams(1e-3))])
        trained = backend._models["0"]
        assert trained.moments is not None and {moment_P.device for moment_P in trained.moments} == {DEVICE}
        offloaded_bytes = trained.offloadable_bytes
        assert offloaded_bytes == 2 * trained.adapter.flat_P.nbytes == trained.offload()
        assert {moment_P.device.type for moment_P in trained.moments} == {"cpu"} and not trained.offloadable_bytes
        run_to_end(backend.run_passes([Pass("a", "0", data(9), "cross_entropy", {}, False)]))
        backend.optim_step([OptimStep("o", "0", AdamParams(1e-3))])
        assert {moment_P.device for moment_P in trained.moments} == {DEVICE}


def test_determinism_is_refused_by_name(qwen: ModelShape) -> None:
    with fake_cuda(), pytest.raises(SettingsError, match=r"deterministic is 'on' and device is 'cuda:0'"):
        DeterministicTrainer(FakeCudaBackend(qwen).base, 64, 64)


@pytest.mark.parametrize(
    ("capability", "grouped"), [((9, 0), True), ((8, 0), False), ((10, 0), True), ((12, 0), False)]
)
def test_grouped_products_are_chosen_by_capability(capability: tuple[int, int], grouped: bool) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability):
        assert moe.has_grouped_mm.__wrapped__(DEVICE) == grouped
    assert not moe.has_grouped_mm.__wrapped__(torch.device("cpu"))


def test_keys_are_gathered_where_triton_is_not_installed() -> None:
    runs_triton = devices.runs_triton.__wrapped__
    with mock.patch.object(devices, "find_spec", lambda name: None):
        assert not runs_triton(DEVICE)
    assert runs_triton(DEVICE) == (find_spec("triton") is not None)
    with mock.patch.object(kv_cache, "runs_triton", lambda device: False):
        assert kv_cache.page_kernels(DEVICE) is None
    assert kv_cache.page_kernels(torch.device("cpu")) is None


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE_BYTES, 2 * FREE_BYTES))


def test_free_memory_is_asked_of_the_driver(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_main._device_memory(Settings(), 1) == (FREE_BYTES, True)
    assert engine_main._device_memory(Settings(device="cuda:1", sampler_shares_device=True), 1) == (
        2 * FREE_BYTES,
        True,
    )
    assert engine_main._device_memory(Settings(device="cpu"), 1)[1] is False
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "70 80\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert engine_main._free_bytes(Settings()) == [70, 80]
    assert len(commands) == 1, "in a process of its own, whose context ends with it"
    assert engine_main._free_bytes(Settings(device="cuda:1")) == []
    compile(engine_main.FREE_BYTES, "child", "exec")


def test_ranks_take_a_device_each_and_both_transports(two_gpus: None) -> None:
    assert sharded._choose_device_type("auto", 2) == sharded._choose_device_type("cuda", 2) == "cuda"
    for name, message in (("cuda:1", "2 devices are needed"), ("cuda", "there are 2 CUDA devices")):
        with pytest.raises(SettingsError, match=message):
            sharded._choose_device_type(name, 2 if ":" in name else 4)
    with (
        mock.patch.object(torch.cuda, "set_device") as set_device,
        mock.patch.object(collectives.dist, "init_process_group") as init_group,
    ):
        collectives.join_process_group(1, 2, mock.Mock(), device="cuda:1")
    set_device.assert_called_once_with(torch.device("cuda:1"))
    assert init_group.call_args.args[0] == "cpu:gloo,cuda:nccl"


def test_nccl_is_aborted_since_the_other_ranks_have_ended(two_gpus: None) -> None:
    parts = dict.fromkeys(("RankProcesses", "open_store", "join_process_group"), mock.DEFAULT)
    with (
        mock.patch.multiple(sharded, **parts),
        mock.patch.object(sharded.dist.distributed_c10d, "_abort_process_group") as aborted,
    ):
        sharded.Group(2, device="cuda", timeout_s=1.0).close()
    aborted.assert_called_once_with()


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:200"])
def test_segments_expand_unless_the_environment_says_otherwise(two_gpus: None, settings: str) -> None:
    with (
        mock.patch.object(torch._C, "_accelerator_getAllocatorSettings", lambda: settings),
        mock.patch.object(torch._C, "_accelerator_setAllocatorSettings") as set_settings,
    ):
        memory.use_expandable_segments()
    assert set_settings.call_args_list == ([] if settings else [mock.call("expandable_segments:True")])


def test_doctor_names_the_devices(two_gpus: None) -> None:
    assert doctor._torch(Settings()).detail.endswith("2 x NVIDIA H100 80GB HBM3")


def test_a_trace_covers_the_device(two_gpus: None, tmp_path: Path) -> None:
    with mock.patch.object(profiling, "profile") as profile:
        traces = profiling.StepTraces(tmp_path)
        with traces.optimizer():
            pass
    assert profile.call_args.kwargs["activities"] == [profiling.ProfilerActivity.CPU, profiling.ProfilerActivity.CUDA]


def test_micro_batches_are_as_large_as_their_activations_may_be_kept(
    qwen: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda():
        backend = open_backend(qwen)
        trainer, recompute = backend._trainer, backend.base.recompute
        sizes: list[int] = []
        monkeypatch.setattr("tinsmith.backends.torch.trainer.pack", lambda _, limit, *_more: sizes.append(limit) or [])
        largest, usual, small = FITTING_TOKENS
        for size, margin in ((largest, 1.01), (largest, 0.99), (usual, 0.99), (small, 0.99)):
            free = margin * size * recompute.bytes_per_token() / RECOMPUTE_SHARE[True]
            monkeypatch.setattr("tinsmith.backends.torch.recompute._free_bytes", lambda _, free=free: free)
            trainer._pack(())
            open_backend(qwen)._trainer._pack(())
            open_backend(qwen, max_tokens_per_microbatch=largest)._trainer._pack(())
    size_groups = [sizes[first : first + 3] for first in range(0, len(sizes), 3)]
    assert size_groups == [[size, size, largest] for size in (largest, usual, small, usual)], "the last are recomputed"


@pytest.mark.extended
def test_cudnn_is_taken_for_long_round_shapes_whatever_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, cudnn = [0], attention._cudnn_attention
    monkeypatch.setattr(
        attention, "_cudnn_attention", lambda *arguments: calls.append(calls.pop() + 1) or cudnn(*arguments)
    )
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    def step(length: int, *, train: bool = True, dtype: torch.dtype = torch.bfloat16) -> int:
        calls[0], plan = 0, attention.PackedCausal([length, length], DEVICE)
        q, k, v = (torch.empty(2 * length, heads, 64, dtype=dtype, device=DEVICE) for heads in (4, 2, 2))
        with torch.set_grad_enabled(train):
            arguments = [x.requires_grad_(train) for x in (q, k, v)]
            outputs = [plan.attend(layer, *arguments, scale=0.1) for layer in range(3)]
        assert {(out.shape, out.dtype) for out in outputs} == {(q.shape, dtype)}
        return calls[0]

    with fake_cuda():
        assert [step(length) for length in (1024, 1023, 1536, 2047)] == [3, 3, 3, 3], "also the first time"
        assert [step(1024, train=False), step(1024, dtype=torch.float32)] == [0, 0]
        assert not any(step(length) for length in (64, 511, 512, 1022, 1025, 1537))
