"""vLLM on one GPU where it is asked for: in turns with training, over adapters that lie in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from support.external_sampling import EOS, SHAPE, ExternalSetup, interpreter, sample
from tinsmith.backends import with_remote_sampler
from tinsmith.backends.fake import FakeBackend
from tinsmith.backends.with_remote_sampler import RemotelySampledBackend, memory_directory
from tinsmith.engine import __main__ as engine_main
from tinsmith.settings import Settings
from tinsmith.types import LoraSpec, Sample, SampleResult


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A machine with one GPU, and the path of a Python that has vLLM."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return interpreter(tmp_path)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(with_remote_sampler, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def test_an_installed_vllm_samples_only_where_it_is_asked_for(one_gpu: str) -> None:
    assert not Settings(sampler_python=one_gpu).samples_elsewhere
    assert Settings(sampler_python=one_gpu, sampler="vllm").samples_elsewhere


@pytest.fixture
def open_engine_backend(
    one_gpu: str, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RemotelySampledBackend, FakeBackend]]:
    """As an engine opens its backend, with a trainer and a vLLM that compute nothing."""
    trainer = FakeBackend(SHAPE)
    monkeypatch.setattr(engine_main, "load_backend", lambda name, shape, **options: trainer)
    monkeypatch.setattr(engine_main, "eos_token_ids", lambda shape: EOS)
    settings = Settings(data_dir=tmp_path, sampler_python=one_gpu, sampler="vllm", sampler_shares_device=True)
    backend = engine_main.open_backend(settings, SHAPE, "here", {})
    assert isinstance(backend, RemotelySampledBackend)
    yield backend, trainer
    backend.sampler.close()


def answer_all(backend: RemotelySampledBackend, *samples: Sample) -> list[SampleResult]:
    setup = ExternalSetup.__new__(ExternalSetup)
    setup.sampler = backend.sampler
    return [setup.answer(sample_) for sample_ in samples]


def test_training_and_vllm_take_turns_over_adapters_in_memory(
    open_engine_backend: tuple[RemotelySampledBackend, FakeBackend], memory: Path, tmp_path: Path
) -> None:
    backend, trainer = open_engine_backend
    (private,) = memory.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    assert trainer.is_asleep, "vLLM measures the free memory when it starts"
    trainer.create_model("m", LoraSpec(rank=8))
    backend.publish("m", "v")
    (first,) = answer_all(backend, sample("a", "v"))
    assert len(list((private / "here").glob("v-*/*"))) > 0 and not list((tmp_path / "sampler/here").iterdir())
    backend.optim_step([])
    assert not trainer.is_asleep and backend.sampler._asleep
    (again,) = answer_all(backend, sample("b", "v"))
    assert trainer.is_asleep and not backend.sampler._asleep
    assert again.sequences[0].tokens_T.tolist() == first.sequences[0].tokens_T.tolist()


def test_a_full_memory_sends_adapters_through_the_disk(
    open_engine_backend: tuple[RemotelySampledBackend, FakeBackend], memory: Path, tmp_path: Path
) -> None:
    backend, trainer = open_engine_backend
    trainer.create_model("m", LoraSpec(rank=8))
    backend.publish("m", "v")
    blocked_path = next(memory.iterdir()) / "here"
    blocked_path.rmdir()
    blocked_path.write_text("")  # a directory cannot be made in it, as if nothing were free
    with capture_logs() as lines:
        answer_all(backend, sample("a", "v"))
    assert [line["event"] for line in lines].count("no space for an adapter in memory; its files go to the disk") == 1
    assert list((tmp_path / "sampler/here").glob("v-*/*"))


def test_a_directory_in_memory_that_others_can_read_is_not_used(memory: Path, tmp_path: Path) -> None:
    directory = memory_directory(tmp_path, "here")
    assert directory is not None and directory.parent.parent == memory
    directory.parent.chmod(0o755)
    assert memory_directory(tmp_path, "here") is None
    directory.parent.rmdir()
    os.symlink(tmp_path, directory.parent)
    assert memory_directory(tmp_path, "here") is None
    memory.chmod(0o500)
    assert os.getuid() == 0 or memory_directory(tmp_path / "other", "here") is None
    memory.chmod(0o700)
