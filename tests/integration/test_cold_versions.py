"""Versions of more models than fit in memory are evicted, and give the same answers when they are sampled again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import tiny_models
from support.engine_bench import Bench
from support.local_sampling import make_prompt, make_sample
from tinsmith.backends.torch import TorchBackend
from tinsmith.engine.versions import VERSIONS_IN_MEMORY, VERSIONS_SHARE
from tinsmith.errors import UserError
from tinsmith.types import AdamParams, LoraSpec, OptimStep, Sample, SampleResult

VERSION_BYTES = 50  # of the fake backend, at most


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as sockets:
        bench = Bench(tmp_path, Path(sockets))
        yield bench
        bench.close()


def with_room_for(bench: Bench, versions: int) -> None:
    room_bytes = int(versions * VERSION_BYTES / VERSIONS_SHARE)
    bench.settings = bench.settings.model_copy(update={"resident_model_bytes": max(room_bytes, 1)})
    bench.restart()


def publish_version(bench: Bench, index: int) -> str:
    """A sampling session of a separate model with its own weights."""
    model = bench.model(f"s{index}:train:0")
    bench.train(model, 1)
    bench.step(model, 2, rate=0.01 * (1 + index))
    sampler = bench.publish(model, 3, 0)
    bench.run_until_idle()
    return sampler


def answers(bench: Bench, samplers: list[str], seq_id: int) -> list[bytes | None]:
    bodies = []
    for sampler in samplers:
        request_id = bench.sample(sampler, seq_id)
        bench.run_until_idle()
        outcome = bench.outcome(request_id)
        assert outcome is not None and outcome.error is None
        bodies.append(outcome.body)
    return bodies


@pytest.mark.extended
def test_versions_of_many_models_take_the_room_of_a_few_and_answer_as_before(bench: Bench) -> None:
    roomy = [publish_version(bench, index) for index in range(10)]
    expected = answers(bench, roomy, 0)
    assert len(set(expected)) > 5, "their weights differ"
    assert len(bench.backend._versions) == 10
    assert not list((bench.directory / "versions").glob("*")), "there is room for all: nothing is written"

    with_room_for(bench, 3)
    assert answers(bench, roomy, 1) == expected
    later_samplers = [publish_version(bench, index) for index in range(10, 22)]
    assert 1 <= len(bench.engine._versions._in_memory) <= 4
    assert bench.engine._versions._bytes_in_memory <= 3 * VERSION_BYTES
    again = answers(bench, later_samplers, 0)
    assert answers(bench, roomy, 2) == expected
    assert answers(bench, later_samplers, 1) == again


def test_the_most_recently_sampled_version_stays(bench: Bench) -> None:
    with_room_for(bench, 3)
    recent_sampler = publish_version(bench, 0)
    for index in range(1, 6):
        publish_version(bench, index)
        answers(bench, [recent_sampler], index)
    assert any(model_id == "s0:train:0" for model_id, _ in bench.engine._versions._in_memory.values())


def test_without_a_place_on_disk_no_version_is_lost(bench: Bench) -> None:
    with_room_for(bench, 2)
    (bench.directory / "versions").write_text("no directory can be made here")
    samplers = [publish_version(bench, index) for index in range(5)]
    assert len(bench.backend._versions) == 5
    assert len(answers(bench, samplers, 0)) == 5


def test_an_unloaded_model_leaves_no_version_in_the_account(bench: Bench) -> None:
    publish_version(bench, 0)
    assert bench.engine._versions._bytes_in_memory > 0
    bench.engine._versions.forget("s0:train:0")
    assert bench.engine._versions._bytes_in_memory == 0 and not bench.engine._versions._in_memory


def test_a_version_that_was_on_disk_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    backend = TorchBackend(tiny_models.make(tmp_path / "model", "qwen3"), device="cpu", dtype="float32")
    backend.create_model("m", LoraSpec(rank=4, seed=3))
    with torch.no_grad():
        backend._models["m"].adapter.flat_P.normal_(0, 0.05)
    backend.optim_step([OptimStep("o", "m", AdamParams(learning_rate=0.1))])
    backend.publish("m", "v")
    sample = make_sample("r", make_prompt(9), version_id="v", topk_sample_logprobs=3)
    before, weights = answer(backend, sample), dict(backend._versions["v"].weights)
    backend.capture_version("v").write(tmp_path / "v")
    backend.drop_version("v")
    backend.load_version("v", tmp_path / "v")
    for name, pair in backend._versions["v"].weights.items():
        assert all(torch.equal(actual, expected) for actual, expected in zip(pair, weights[name], strict=True))
    after = answer(backend, sample)
    assert before.sequences[0].tokens_T.tolist() == after.sequences[0].tokens_T.tolist()
    assert before.sequences[0].logprobs_T.tolist() == after.sequences[0].logprobs_T.tolist()


def answer(backend: TorchBackend, sample: Sample) -> SampleResult:
    backend.sampler.submit(sample)
    outcomes: list[tuple[str, SampleResult | UserError]] = []
    while not outcomes:
        outcomes = backend.sampler.step()
    assert isinstance(outcomes[0][1], SampleResult)
    return outcomes[0][1]


def test_a_publish_lets_those_go_that_have_files_already(bench: Bench) -> None:
    model = bench.model()
    samplers = [bench.publish(model, index + 1, index) for index in range(VERSIONS_IN_MEMORY + 3)]
    bench.run_until_idle(20)
    expected = answers(bench, samplers, 0)
    assert len(bench.backend._versions) == len(samplers), "an engine that is never idle kept them all"
    bench.engine._snapshots.write_versions(model)
    bench.engine.flush()
    samplers.append(bench.publish(model, len(samplers) + 1, len(samplers)))
    bench.run_until_idle(5)
    versions = bench.engine._versions
    assert len(versions._ephemeral[model]) == VERSIONS_IN_MEMORY == len(versions._in_memory)
    assert len(bench.backend._versions) == VERSIONS_IN_MEMORY
    assert answers(bench, samplers[:-1], 1) == expected
    # All versions without a file stay in memory.
    for index in range(len(samplers), len(samplers) + VERSIONS_IN_MEMORY + 1):
        samplers.append(bench.publish(model, index + 1, index))
    bench.run_until_idle(20)
    assert len(versions._ephemeral[model]) == VERSIONS_IN_MEMORY + 2
