"""A trainer and an external engine share a device: one of them has its memory and the other sleeps.

The fakes refuse orders that a real engine or device would not survive: `Fake.broken` lists them, and `Trainer` fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from support import external_engines
from support.external_engines import DEADLY
from support.external_sampling import PATIENCE_S, SHAPE, ExternalSetup, Fake, Outcome, interpreter, sample, until
from tinsmith.backends import run_to_end
from tinsmith.backends.fake import FakeBackend
from tinsmith.errors import EngineFailedError, TinsmithError
from tinsmith.samplers.remote import connection as connection_module
from tinsmith.types import SampleResult


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


PARTS = {"vllm": ["weights", "kv_cache"], "sglang": ["kv_cache", "cuda_graph", "weights"]}


class Trainer(FakeBackend):
    """Takes the device only while the engine sleeps or is dead."""

    def __init__(self, fake: Fake, parts: list[str]) -> None:
        super().__init__(SHAPE)
        self.fake, self.parts = fake, parts
        self.shortages = 0
        fake.device_is_free = False  # the base model is loaded

    def sleep(self) -> None:
        if self.shortages:
            self.shortages -= 1
            raise MemoryError("the host has no room")
        super().sleep()
        self.fake.device_is_free = True

    def wake_up(self) -> None:
        if not self.is_asleep:
            return
        assert self.fake.dead or self.fake.asleep == self.parts, self.fake.asleep
        if self.shortages:
            self.shortages -= 1
            raise MemoryError("the device has no room")
        super().wake_up()
        self.fake.device_is_free = False


Open = Callable[..., ExternalSetup]


@pytest.fixture
def open_setup(tmp_path: Path) -> Iterator[Open]:
    engines: list[Fake] = []
    with contextlib.ExitStack() as entered:

        def open_(kind: str) -> ExternalSetup:
            engines.append(entered.enter_context(external_engines.running(kind, Fake())))
            setup = ExternalSetup(kind, engines[0], tmp_path, Trainer(engines[0], PARTS[kind]), shares_device=True)
            entered.callback(setup.sampler.close)
            setup.publish("v", 0.3)
            setup.answer(sample("up", "v"))
            return setup

        yield open_
    assert [engine.broken for engine in engines] == [[]]


ORDERS = {
    "vllm": (["/sleep?level=1"], ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]),
    "sglang": (["/flush_cache", *["/release_memory_occupation"] * 3], ["/resume_memory_occupation"] * 3),
}


def tags(setup: ExternalSetup, path: str) -> list[str]:
    return [tag for request_path, body in setup.fake.requests if request_path == path for tag in body["tags"]]


def test_each_has_the_device_alone_and_hands_it_over_in_order(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    assert setup.trainer.is_asleep, "the engine has the device first"
    setup.fake.pause_s = PATIENCE_S
    setup.sampler.submit(sample("running", "v"))
    until(lambda: setup.fake.running == 1)
    threading.Timer(0.1, setattr, (setup.fake, "pause_s", 0.0)).start()
    setup.backend.optim_step([])
    # What ran has ended before, and nothing that was loaded is relied on afterwards.
    unload = "/v1/unload_lora_adapter" if kind == "vllm" else "/unload_lora_adapter"
    asleep, awake = ORDERS[kind]
    assert setup.fake.running == 0 and not setup.trainer.is_asleep
    assert setup.fake.paths()[-len(asleep) - 1 :] == [unload, *asleep]
    run_to_end(setup.backend.run_passes([]))  # it sleeps already
    assert setup.fake.paths()[-len(asleep) :] == asleep
    mark = len(setup.fake.requests)
    setup.sampler.submit(sample("later", "v"))
    assert not setup.trainer.is_asleep, "nothing moves before a step of the sampler"
    outcomes = setup.collect()
    assert setup.trainer.is_asleep
    assert isinstance(outcomes["running"], SampleResult) and isinstance(outcomes["later"], SampleResult)
    load = unload.replace("unload", "load")
    assert setup.fake.paths()[mark : mark + len(awake) + 1] == [*awake, load]
    if kind == "sglang":
        assert tags(setup, "/release_memory_occupation") == ["kv_cache", "cuda_graph", "weights"]
        assert tags(setup, "/resume_memory_occupation") == ["weights", "cuda_graph", "kv_cache"]


def test_requests_queue_while_the_trainer_has_the_device_and_none_is_lost(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    expected = {f"r{turn}": setup.answer(sample(f"r{turn}", "v", n=2, seed=turn)) for turn in range(6)}
    outcomes: dict[str, Outcome] = {}
    for turn, request_id in enumerate(expected):
        setup.sampler.submit(sample(request_id, "v", n=2, seed=turn))
        setup.backend.optim_step([])
        assert setup.fake.running == 0
        if turn % 2:
            outcomes.update(
                setup.sampler.step()
            )  # too short for an answer, which the next step interrupts or waits for
    outcomes |= setup.collect()
    assert outcomes.keys() == expected.keys()
    for request_id, expected_result in expected.items():
        outcome = outcomes[request_id]
        assert isinstance(outcome, SampleResult), outcome
        for sequence, other in zip(expected_result.sequences, outcome.sequences, strict=True):
            assert sequence.tokens_T.tolist() == other.tokens_T.tolist()


def test_an_engine_that_dies_asleep_comes_back_when_the_trainer_has_left(
    kind: str, open_setup: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HEALTH_S", 0.1)
    setup = open_setup(kind)
    before = setup.answer(sample("before", "v"))
    setup.backend.optim_step([])
    connection = setup.sampler._connection
    era = connection.era
    setup.fake.die()
    setup.sampler.submit(sample("after", "v"))
    until(lambda: not connection.is_up(era))
    setup.fake.dead = False  # others started it again; it is awake
    mark = len(setup.fake.requests)
    setup.backend.optim_step([])
    assert setup.fake.requests[mark:] == [], "no request while the trainer has the device"
    after = setup.collect()["after"]
    assert isinstance(after, SampleResult), after
    assert after.sequences[0].tokens_T.tolist() == before.sequences[0].tokens_T.tolist()
    awake = ORDERS[kind][1]
    assert not set(awake) & set(setup.fake.paths()[mark:]), "it has nothing to take back"


def test_memory_that_runs_out_leaves_the_device_to_the_other(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)
    assert isinstance(setup.trainer, Trainer)
    setup.trainer.shortages = 1
    with pytest.raises(MemoryError, match="device"):
        setup.backend.optim_step([])
    assert setup.trainer.is_asleep and setup.fake.asleep == PARTS[kind], "the device is free"
    setup.answer(sample("sampled", "v"))
    setup.backend.optim_step([])
    setup.trainer.shortages = 1
    setup.sampler.submit(sample("waits", "v"))
    with pytest.raises(EngineFailedError, match="the host has no room for the trainer's memory while"):
        setup.sampler.step()
    assert setup.fake.asleep == PARTS[kind]
    setup.backend.optim_step([])  # the trainer goes on
    assert isinstance(setup.collect()["waits"], SampleResult)


def test_a_step_that_fails_leaves_the_engine_asleep_until_the_trainer_has_left(kind: str, open_setup: Open) -> None:
    setup = open_setup(kind)

    def fail(*_: object) -> list[dict[str, float]]:
        raise RuntimeError("broken")

    setup.trainer.optim_step = fail
    with pytest.raises(RuntimeError):
        setup.backend.optim_step([])
    assert setup.fake.asleep == PARTS[kind]
    assert isinstance(setup.run(sample("r", "v"))["r"], SampleResult)
    assert setup.trainer.is_asleep and setup.fake.asleep == []


def test_sglang_that_refuses_takes_back_what_it_has_released(open_setup: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = open_setup("sglang")
    release = setup.fake.release

    def refuse(*parts: str) -> None:
        if "weights" in parts:
            raise RuntimeError("no")
        release(*parts)

    monkeypatch.setattr(setup.fake, "release", refuse)
    with pytest.raises(TinsmithError):
        setup.backend.optim_step([])
    assert tags(setup, "/resume_memory_occupation") == ["cuda_graph", "kv_cache"]
    assert setup.trainer.is_asleep
    setup.answer(sample("still", "v"))


def test_sglang_may_end_an_aborted_request_late(open_setup: Open) -> None:
    setup = open_setup("sglang")
    setup.fake.running = 1  # of an abort that is not done yet
    threading.Timer(0.3, setattr, (setup.fake, "running", 0)).start()
    setup.backend.optim_step([])
    assert setup.fake.paths().count("/flush_cache") > 1


def test_a_child_is_not_started_while_the_trainer_has_the_device(tmp_path: Path) -> None:
    setup = ExternalSetup("vllm", Fake(), tmp_path, url="", python=interpreter(tmp_path), shares_device=True)
    try:
        assert setup.trainer.is_asleep
        setup.publish("v", 0.3)
        setup.backend.optim_step([])  # waits for the child, which measures free memory while it starts
        connection = setup.sampler._connection
        assert connection.era == 1 and not setup.trainer.is_asleep
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{setup.sampler.address}/v1/completions", json={"prompt": [DEADLY]})
        until(lambda: not connection.is_up(1))
        setup.sampler.submit(sample("r", "v"))
        setup.backend.optim_step([])
        assert not connection._has_child and connection.era == 1
        assert isinstance(setup.collect()["r"], SampleResult)
        assert connection.era == 2 and setup.trainer.is_asleep
    finally:
        setup.sampler.close()
