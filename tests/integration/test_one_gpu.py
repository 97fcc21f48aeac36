"""What samples on one GPU: vLLM where it is installed, in turns with training, over adapters that lie in memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from support.external_sampling import EOS, SHAPE, ExternalSetup, interpreter, sample
from tinsmith.backends import with_remote_sampler
from tinsmith.backends.fake import FakeBackend
from tinsmith.backends.with_remote_sampler import RemotelySampledBackend, memory_directory
from tinsmith.base_models import nano, read_shape
from tinsmith.cli.doctor import examine
from tinsmith.cluster.executors import SAMPLER
from tinsmith.cluster.sampler_choice import choose_sampler
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


def test_an_engine_alone_on_a_gpu_uses_the_vllm_that_is_installed(one_gpu: str) -> None:
    for device in ("auto", "cuda", "cuda:0", "cuda:3"):
        name, reason = choose_sampler(Settings(sampler_python=one_gpu, device=device), "Any", images=False)
        assert (name, reason[:11]) == ("vllm", "vLLM 0.32.0"), device


LOCAL: list[tuple[dict[str, object], str]] = [
    ({"device": "cpu"}, "device is 'cpu'"),
    ({"backend": "full"}, "not one that trains adapters"),
    ({"data_parallel": 2}, "not one that trains adapters"),
    ({"shard_base": True}, "not one that trains adapters"),
    ({"engines": 2}, "2 engines"),
    ({"models": ("a", "b")}, "2 models"),
    ({"samplers": 1}, "dedicated samplers"),
    ({"deterministic": True}, "deterministic"),
    ({"quantize": "nf4"}, "quantize is 'nf4'"),
    ({"memory_budget": 2**33, "sampler_sequences": 4}, "memory_budget, sampler_sequences"),
]


@pytest.mark.parametrize(("changes", "expected_reason"), LOCAL, ids=[next(iter(changes)) for changes, _ in LOCAL])
def test_the_engine_samples_itself_where_vllm_would_not_do(
    changes: dict[str, object], expected_reason: str, one_gpu: str
) -> None:
    settings = Settings.model_validate({"sampler_python": one_gpu, **changes})
    name, reason = choose_sampler(settings, "Any", images=False)
    assert name == "local" and expected_reason in reason


def test_images_unknown_models_and_missing_engines_are_reasons(one_gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(sampler_python=one_gpu)
    assert "images" in choose_sampler(settings, "Any", images=True)[1]
    assert "does not support OtherForCausalLM" in choose_sampler(settings, "OtherForCausalLM", images=False)[1]
    name, reason = choose_sampler(Settings(), "Any", images=False)
    assert name == "local" and f"{sys.executable} has no vLLM; install tinsmith[vllm]" in reason
    assert choose_sampler(Settings(sampler_python="/no/such"), "Any", images=False)[0] == "local"
    for count, expected_reason in ((0, "no GPU"), (2, "2 GPUs")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert expected_reason in choose_sampler(settings, "Any", images=False)[1]


def test_doctor_says_what_samples_and_why(one_gpu: str, tmp_path: Path) -> None:
    def sampler_detail(**changes: object) -> str:
        settings = Settings.model_validate({"data_dir": tmp_path, "port": 0, **changes})
        return next(finding.detail for finding in examine(settings) if finding.what == "sampler")

    assert sampler_detail(sampler_python=one_gpu).startswith(f"vllm for {nano.MODEL_NAME}: vLLM 0.32.0 of {one_gpu}")
    assert sampler_detail(device="cpu") == f"local for {nano.MODEL_NAME}: device is 'cpu'"
    assert sampler_detail(sampler="local") == f"local for {nano.MODEL_NAME}: the settings say so"


@pytest.fixture
def open_engine_backend(
    one_gpu: str, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RemotelySampledBackend, FakeBackend]]:
    """As an engine opens its backend, with a trainer and a vLLM that compute nothing."""
    trainer = FakeBackend(SHAPE)
    monkeypatch.setattr(engine_main, "load_backend", lambda name, shape, **options: trainer)
    monkeypatch.setattr(engine_main, "eos_token_ids", lambda shape: EOS)
    with capture_logs() as lines:
        settings = engine_main._resolve_sampler(Settings(data_dir=tmp_path, sampler_python=one_gpu), SHAPE, "engine")
    assert [(line["event"], line["sampler"]) for line in lines] == [("sampler chosen", "vllm")]
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


def test_a_dedicated_sampler_keeps_its_setting(one_gpu: str) -> None:
    settings = Settings(sampler_python=one_gpu)
    assert engine_main._resolve_sampler(settings, SHAPE, SAMPLER) is settings and not settings.samples_elsewhere


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


def test_the_embedded_model_is_one_that_the_choice_can_be_asked_for(one_gpu: str) -> None:
    shape = read_shape(nano.MODEL_NAME, nano.path())
    assert choose_sampler(Settings(sampler_python=one_gpu), shape.arch, images=False)[0] == "vllm"
