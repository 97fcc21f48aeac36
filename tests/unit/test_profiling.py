"""Traces of an engine's first steps: which files are written, the ranges in them, and NVTX's ranges."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support import tiny_models
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends import run_to_end
from tinsmith.backends.torch import TorchBackend, profiling
from tinsmith.engine.__main__ import _options
from tinsmith.errors import SettingsError, UserError
from tinsmith.settings import Settings
from tinsmith.types import AdamParams, Datum, LoraSpec, ModelShape, OptimStep, Pass, SamplingParams

TRAINED = {"forward", "loss", "backward", "read logprobs"}
SAMPLED = {f"decode: {name}" for name in ("schedule", "forward", "sample", "read")}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("llama"), "llama")


def pass_of(num: int) -> Pass:
    """Data of 20 tokens, each with another first one."""
    tokens = np.arange(1, 22)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(20, np.float32)}
    sequences = [np.array([100 + first, *tokens[1:-1]], np.int32) for first in range(num)]
    return Pass("p", "m", tuple(Datum(sequence, inputs) for sequence in sequences), "cross_entropy", {}, False)


def sample(backend: TorchBackend, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, stop_eos=False, seed=1)
    backend.sampler.submit(make_sample("s", make_prompt(5), params, version_id="v"))
    while backend.sampler.has_work:
        backend.sampler.step()


def ranges(path: Path) -> list[str]:
    """The names of our ranges in a trace, in order of time."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    range_events = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(range_events, key=lambda event: event["ts"])]


@pytest.mark.extended
def test_the_first_steps_are_traced_with_a_range_for_each_stage(shape: ModelShape, tmp_path: Path) -> None:
    backend = TorchBackend(shape, device="cpu", profile=str(tmp_path / "traces"))
    plain = TorchBackend(shape, device="cpu")
    for candidate in (backend, plain):
        candidate.create_model("m", LoraSpec(4, seed=1))
        for _ in range(profiling.FILES + 2):
            run_to_end(candidate.run_passes([pass_of(2)]))
            candidate.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
        candidate.publish("m", "v")
        sample(candidate, 3)
        sample(candidate, profiling.DECODE_STEPS + 3)
    trained, expected = (candidate._models["m"].adapter.flat_P for candidate in (backend, plain))
    assert torch.equal(trained, expected)
    ranges_by_kind = {path.name.split("-")[0]: [] for path in (tmp_path / "traces").iterdir()}
    for path in sorted((tmp_path / "traces").iterdir()):
        ranges_by_kind[path.name.split("-")[0]].append(ranges(path))
    assert {kind: len(files) for kind, files in ranges_by_kind.items()} == {
        "training": 4,
        "optimizer": 4,
        "sampling": 3,
    }
    assert ranges_by_kind["training"][0] == ["forward", "loss", "backward", "read logprobs"]
    assert ranges_by_kind["optimizer"][0] == ["optimizer"]
    assert all(set(names) == SAMPLED for names in ranges_by_kind["sampling"])
    steps = [names.count("decode: forward") for names in ranges_by_kind["sampling"]]
    assert steps == [3, profiling.DECODE_STEPS, 3], "until the work ends, a full file, the rest"


@pytest.mark.extended
def test_a_long_training_step_is_traced_in_part_with_the_decode_steps_between(
    shape: ModelShape, tmp_path: Path
) -> None:
    backend = TorchBackend(shape, device="cpu", profile=str(tmp_path), max_tokens_per_microbatch=20)
    backend.create_model("m", LoraSpec(4, seed=1))
    backend.publish("m", "v")
    params = SamplingParams(max_tokens=40, stop_eos=False, seed=1)
    backend.sampler.submit(make_sample("s", make_prompt(5), params, version_id="v"))
    run_to_end(backend.run_passes([pass_of(profiling.MICRO_BATCHES + 3)]), lambda: backend.sampler.step() and None)
    names = ranges(next(tmp_path.glob("training-*")))
    assert names.count("backward") == profiling.MICRO_BATCHES
    assert set(names) == TRAINED | SAMPLED
    backend.sampler.cancel("s")
    with pytest.raises(ZeroDivisionError):
        run_to_end(backend.run_passes([pass_of(3)]), lambda: 1 // 0)
    assert ranges(next(tmp_path.glob("training-*-1.*"))).count("backward") == 1, "an aborted step is written, too"
    assert backend._traces._open is None


def test_without_a_directory_nothing_is_recorded(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cpu")
    backend.create_model("m", LoraSpec(4, seed=1))
    with mock.patch.object(profiling, "profile", side_effect=AssertionError):
        run_to_end(backend.run_passes([pass_of(1)]))
        backend.publish("m", "v")
        sample(backend, 2)


def test_stages_are_ranges_of_nvtx_where_torch_has_cuda() -> None:
    pushed: list[str] = []
    nvtx = mock.Mock(range_push=pushed.append, range_pop=lambda: pushed.append("end"))
    with mock.patch.object(profiling, "_has_nvtx", lambda: True), mock.patch.object(torch.cuda, "nvtx", nvtx):
        with pytest.raises(ValueError), profiling.stage("outer"), profiling.stage("inner"):
            raise ValueError
    assert pushed == ["outer", "inner", "end", "end"]


def test_the_setting_reaches_a_backend_on_one_device_and_no_other(tmp_path: Path) -> None:
    assert _options(Settings(profile=tmp_path))["profile"] == str(tmp_path)
    assert "profile" not in _options(Settings())
    with pytest.raises(SettingsError, match="profile is for an engine on one device"):
        _options(Settings(profile=tmp_path, data_parallel=2))


def test_a_profile_on_demand_has_its_own_files_and_changes_nothing(shape: ModelShape, tmp_path: Path) -> None:
    backend, plain = TorchBackend(shape, device="cpu"), TorchBackend(shape, device="cpu")
    for candidate in (backend, plain):
        candidate.create_model("m", LoraSpec(4, seed=1))
        for number in range(3):
            if candidate is backend and number == 1:
                running = backend.start_profile(tmp_path / "profile")
                with pytest.raises(UserError, match="a profile has begun already"):
                    backend.start_profile(tmp_path / "other")
            run_to_end(candidate.run_passes([pass_of(2)]))
            candidate.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
            if candidate is backend and number == 1:
                backend.publish("m", "v")
                sample(backend, 2)
                assert not running.is_full
                files = running.stop()
    assert sorted(path.name.split("-")[0] for path in files) == ["optimizer", "sampling", "training"]
    assert set(files) == set((tmp_path / "profile").iterdir())
    assert set(ranges(next(path for path in files if path.name.startswith("training")))) == TRAINED
    assert torch.equal(*(candidate._models["m"].adapter.flat_P for candidate in (backend, plain)))
    assert backend.start_profile(tmp_path / "again").stop() == []


@pytest.mark.parametrize("kind", ["full disk", "replaced directory"])
def test_a_trace_that_cannot_be_written_ends_the_profile_and_not_the_step(
    shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    backend, plain = (TorchBackend(shape, device="cpu") for _ in range(2))
    traces = backend.start_profile(tmp_path / "traces")
    if kind == "full disk":

        def fill(_: object, path: str) -> None:
            Path(path).touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fill)
    else:
        (tmp_path / "traces").rmdir()
        (tmp_path / "traces").write_text("a file")
    for candidate in (backend, plain):
        candidate.create_model("m", LoraSpec(4, seed=1))
        for _ in range(2):
            run_to_end(candidate.run_passes([pass_of(2)]))
            candidate.optim_step([OptimStep("o", "m", AdamParams(1e-2))])
        candidate.publish("m", "v")
        sample(candidate, 3)
    trained, expected = (candidate._models["m"].adapter.flat_P for candidate in (backend, plain))
    assert torch.equal(trained, expected) and traces.is_full
    with pytest.raises(UserError, match=r"a trace could not be made: .*(No space left|Not a directory|[Dd]irectory)"):
        traces.stop()
    assert kind != "full disk" or list((tmp_path / "traces").iterdir()) == []
    monkeypatch.undo()
    backend.start_profile(tmp_path / "again")
    run_to_end(backend.run_passes([pass_of(2)]))
    assert len(traces.stop()) == 1
