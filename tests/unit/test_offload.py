"""A backend that sleeps leaves its device, and goes on bit for bit as if it had not slept.

On a CPU `offload` is 'on', so memory is freed and filled again as on a GPU; buffers that were left are filled with NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from support import tiny_models
from support.fake_cuda import DEVICE, Event, FakeCudaBackend, Stream, fake_cuda
from support.ranked import pass_of
from tinsmith.backends import run_to_end
from tinsmith.backends.full import FullBackend
from tinsmith.backends.torch import TorchBackend, host
from tinsmith.backends.torch.adapters import TrainedModel
from tinsmith.types import AdamParams, DimuonParams, LoraSpec, ModelShape, OptimParams, OptimStep, PassResult

torch.set_num_threads(1)

OPTIMIZERS: dict[str, OptimParams] = {"m0": AdamParams(1e-2), "m1": DimuonParams(1e-2)}
KINDS = ("adapters", "bfloat16", "int8", "nf4", "full")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(params=KINDS)
def open_backend(request: pytest.FixtureRequest, shape: ModelShape) -> Callable[[], TorchBackend]:
    def open_() -> TorchBackend:
        if request.param == "full":
            backend: TorchBackend = FullBackend(shape, device="cpu", offload="on")
            backend.create_model("m0", LoraSpec(0))
            return backend
        dtype = "bfloat16" if request.param == "bfloat16" else "float32"
        quantize = request.param if request.param in ("int8", "nf4") else "off"
        if quantize != "off":
            pytest.importorskip("bitsandbytes")
        backend = TorchBackend(shape, device="cpu", dtype=dtype, quantize=quantize, offload="on")
        for index, (model_id, params) in enumerate(OPTIMIZERS.items()):
            backend.create_model(model_id, LoraSpec(4 + index, seed=index), params.family)
        return backend

    return open_


def accumulate(backend: TorchBackend, seed: int) -> list[PassResult]:
    rng = np.random.default_rng(seed)
    passes = [pass_of(rng, index, [9, 4]) for index, name in enumerate(OPTIMIZERS) if backend.has_model(name)]
    results = run_to_end(backend.run_passes(passes))
    assert all(isinstance(result, PassResult) for result in results), results
    return [result for result in results if isinstance(result, PassResult)]


def step(backend: TorchBackend) -> list[object]:
    steps = [OptimStep("o", name, params) for name, params in OPTIMIZERS.items() if backend.has_model(name)]
    return list(backend.optim_step(steps))


def sleep(backend: TorchBackend) -> None:
    """What was on the device is lost."""
    device_buffers = [buffer for model in backend._models.values() for buffer in model.buffers(moments=True)]
    before = [buffer.clone() for buffer in device_buffers]
    backend.sleep()
    now = [buffer for model in backend._models.values() for buffer in model.buffers(moments=True)]
    for old, new, expected in zip(device_buffers, now, before, strict=True):
        assert old.data_ptr() != new.data_ptr() and torch.equal(new, expected)
        old.fill_(torch.nan)
    assert backend._frozen is not None and backend._frozen.num_bytes == 0
    assert set(backend.memory_use().values()) == {0}


def buffers(backend: TorchBackend) -> list[torch.Tensor]:
    return [buffer for model in backend._models.values() for buffer in model.buffers(moments=True)]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".safetensors"}


def test_steps_after_a_sleep_are_those_without_one_bit_for_bit(
    open_backend: Callable[[], TorchBackend], tmp_path: Path
) -> None:
    awake, sleeping = open_backend(), open_backend()
    for turn in range(3):
        for part in range(2):  # a gradient from before the sleep gets another one added
            expected, actual = accumulate(awake, 2 * turn + part), accumulate(sleeping, 2 * turn + part)
            for reference, slept in zip(expected, actual, strict=True):
                assert [x.tobytes() for x in slept.logprobs] == [x.tobytes() for x in reference.logprobs]
            awake.publish("m0", "v")
            sleeping.publish("m0", "v")
            version = sleeping._versions["v"]
            sleep(sleeping)
            assert sleeping._versions["v"] is version
            for name, backend in (("one", awake), ("other", sleeping)):
                directory = tmp_path / f"{name}{turn}{part}"
                for kind, capture in (
                    ("model", backend.capture("m0") if turn else None),
                    ("version", backend.capture_version("v")),
                ):
                    if capture is not None:
                        (directory / kind).mkdir(parents=True)
                        capture.write(directory / kind)
            for kind in ("model", "version") if turn else ("version",):
                assert (
                    files(tmp_path / f"one{turn}{part}" / kind) == files(tmp_path / f"other{turn}{part}" / kind) != {}
                )
            sleeping.wake_up()
        assert step(awake) == step(sleeping)
        if turn == 1:
            sleep(sleeping)  # with moments and without a gradient
            sleeping.wake_up()
    for reference, slept in zip(buffers(awake), buffers(sleeping), strict=True):
        assert torch.equal(slept, reference)


def test_models_that_are_made_asleep_train_awake(open_backend: Callable[[], TorchBackend], tmp_path: Path) -> None:
    awake, sleeping = open_backend(), open_backend()
    accumulate(awake, 0)
    step(awake)
    awake.save("m0", tmp_path, optimizer=True, stacked=True)
    spec = awake._models["m0"].adapter.spec
    sleep(sleeping)
    sleeping.load("m0", spec, tmp_path, optimizer=True)
    sleeping.load_version("v", tmp_path)
    if sleeping.has_model("m1"):
        awake.create_model("m1", LoraSpec(5, seed=7), "dimuon")
        sleeping.create_model("m1", LoraSpec(5, seed=7), "dimuon")
    sleeping.wake_up()
    for backend in (awake, sleeping):
        accumulate(backend, 1)
    assert step(awake) == step(sleeping)
    assert [x.tolist() for x in buffers(sleeping)] == [x.tolist() for x in buffers(awake)]


def test_a_backend_that_sleeps_refuses_steps_and_one_on_a_cpu_has_no_reason_to_sleep(shape: ModelShape) -> None:
    backend = TorchBackend(shape, device="cpu", offload="on")
    backend.sleep()
    backend.sleep()
    with pytest.raises(AssertionError):
        backend.run_passes([])
    with pytest.raises(AssertionError):
        backend.optim_step([])
    backend.wake_up()
    backend.wake_up()
    run_to_end(backend.run_passes([]))
    usual = TorchBackend(shape, device="cpu")
    usual.sleep()
    assert usual.memory_use()["base"] > 0
    run_to_end(usual.run_passes([]))


@pytest.mark.parametrize("during", ["sleep", "wake_up"])
def test_memory_that_runs_out_changes_nothing(
    open_backend: Callable[[], TorchBackend], during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, sleeping = open_backend(), open_backend()
    for backend in (awake, sleeping):
        accumulate(backend, 0)
        step(backend)
        accumulate(backend, 1)
    if during == "wake_up":
        sleeping.sleep()
    asleep = sleeping._is_asleep
    host_copies, own_bytes = host.host_copies, host._bytes_of
    for missing_after in range(3):
        calls_left = [missing_after]

        def copies(tensors: list[torch.Tensor], calls_left: list[int] = calls_left) -> object:
            calls_left[0] -= 1
            if calls_left[0] < 0:
                raise MemoryError("no room")
            return host_copies(tensors)

        def bytes_of(store: torch.UntypedStorage, calls_left: list[int] = calls_left) -> torch.Tensor:
            if during == "wake_up" and store.nbytes():
                calls_left[0] -= 1
                if calls_left[0] == -1:
                    raise RuntimeError("CUDA error: out of memory")
            return own_bytes(store)

        with monkeypatch.context() as patched:
            if during == "sleep":
                patched.setattr(host, "host_copies", copies)
                patched.setattr("tinsmith.backends.torch.adapters.host_copies", copies)
            patched.setattr(host, "_bytes_of", bytes_of)
            try:
                getattr(sleeping, during)()
            except MemoryError:
                assert sleeping._is_asleep == asleep
                assert sleeping._frozen is None or (sleeping._frozen.num_bytes == 0) == asleep
            else:
                assert calls_left[0] >= 0
                break
    sleeping.sleep()
    sleeping.wake_up()
    assert step(awake) == step(sleeping)
    for reference, slept in zip(buffers(awake), buffers(sleeping), strict=True):
        assert torch.equal(slept, reference)


def on_device() -> list[tuple[int, ...]]:
    """The shapes of tensors with more than a page of memory on the fake device."""
    gc.collect()
    alive = (tensor for tensor in gc.get_objects() if type(tensor) in (FakeTensor, torch.nn.Parameter))
    device_tensors = [
        tensor for tensor in alive if tensor.device == DEVICE and tensor.untyped_storage().nbytes() > 4096
    ]
    return [tuple(tensor.shape) for tensor in device_tensors]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("arch", ["qwen3", "gpt_oss"])
def test_everything_of_a_gpu_goes_to_the_host_and_back(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = tiny_models.make(tmp_path, arch)
    emptied: list[bool] = []
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _=None: None)
        backend = FakeCudaBackend(shape)
        backend.create_model("m0", LoraSpec(8))  # grouped products of experts take multiples of 8
        accumulate(backend, 0)
        backend.optim_step([OptimStep("o", "m0", AdamParams(1e-3))])
        accumulate(backend, 1)
        backend.publish("m0", "v")
        assert len(on_device()) > 10
        backend.sleep()
        assert emptied and on_device() == []
        assert {buffer.device.type for buffer in buffers(backend)} == {"cpu"}
        assert backend._versions["v"].flat_P is backend._models["m0"].adapter.flat_P
        backend.wake_up()
        trained = backend._models["m0"]
        assert {buffer.device for buffer in trained.buffers(moments=False)} == {DEVICE}
        assert trained.moments is not None and {moment_P.device.type for moment_P in trained.moments} == {"cpu"}
        backend.optim_step([OptimStep("o", "m0", AdamParams(1e-3))])
        assert {moment_P.device for moment_P in trained.moments} == {DEVICE}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("failing", ["_bytes_of", "_wait_for_copies"])
def test_a_gpu_without_room_to_wake_up_is_left_to_the_other_process(
    failing: str, shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_at: list[list[tuple[int, ...]]] = []
    with fake_cuda():
        backend = FakeCudaBackend(shape)
        backend.create_model("m0", LoraSpec(8))
        backend.sleep()
        original, calls = getattr(host, failing), iter(range(9))

        def fail(argument: object) -> object:
            if next(calls) == (3 if failing == "_bytes_of" else 0):
                raise RuntimeError("CUDA error: out of memory")
            return original(argument)

        with monkeypatch.context() as patched:
            patched.setattr(host, failing, fail)
            patched.setattr(torch.cuda, "empty_cache", lambda: left_at.append(on_device()))
            with pytest.raises(MemoryError, match="out of memory"):
                backend.wake_up()
        assert left_at == [[]] and backend._is_asleep
        backend.wake_up()
        assert {buffer.device for buffer in buffers(backend)} == {DEVICE}


@pytest.mark.parametrize("fails", [False, True])
def test_a_captured_model_goes_to_the_host_on_a_stream_of_its_own(
    fails: bool, shape: ModelShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of calls alone: no device shows here that training goes on meanwhile."""
    order: list[str] = []

    class SideOfTest(Stream):
        def wait_event(self, event: Event) -> None:
            super().wait_event(event)
            order.append("wait for what was queued")

        def synchronize(self) -> None:
            order.append("complete")

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        assert isinstance(stream, SideOfTest)
        order.append("enter")
        yield
        order.append("leave")

    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "Stream", SideOfTest)
        monkeypatch.setattr(torch.cuda, "stream", use)
        backend = FakeCudaBackend(shape)
        backend.create_model("m0", LoraSpec(8))
        accumulate(backend, 0)
        captured = backend.capture("m0")
        live = backend._models["m0"]

        def write(trained: TrainedModel, _optimizer: bool, directory: Path, **_: bool) -> None:
            assert directory == tmp_path and trained is not live
            order.append(f"write from { ({x.device.type for x in trained.buffers(moments=True)}) }")
            if fails:
                raise OSError("the disk is full")

        monkeypatch.setattr(backend, "_write", write)
        assert order == [], "nothing is copied to the host while the engine waits"
        with pytest.raises(OSError, match="full") if fails else nullcontext():
            captured.write(tmp_path)
        assert {x.device for x in live.buffers(moments=True)} == {DEVICE}
    assert order == ["wait for what was queued", "enter", "write from {'cpu'}", "complete"] + ["leave"] * (not fails)


def test_a_captured_model_of_a_cpu_needs_no_stream(shape: ModelShape) -> None:
    stream = host.SideStream(torch.device("cpu"))
    with stream.use():
        assert not stream.is_apart
