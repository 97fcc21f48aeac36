"""Machines of a job that cannot set up its function, and the GPUs that workers may have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.batch.coordinator import coordinator as coordinators
from tinsmith.batch.coordinator.hosts import MAX_LISTED, UNKNOWN, HostHealth
from tinsmith.batch.pools import devices
from tinsmith.batch.pools.devices import Devices, devices_of, engine_positions, visible_devices
from tinsmith.batch.pools.local import LocalPool
from tinsmith.batch.pools.specs import PoolSpec, most_workers
from tinsmith.batch.types import JobSpec, Limits
from tinsmith.batch.worker.logs import JobLogs
from tinsmith.errors import UserError
from tinsmith.settings import Settings

FLEET = [f"10.0.0.{index}" for index in range(91)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hosts(clock: Clock) -> HostHealth:
    return HostHealth(Limits(backoff_s=1.0, discovery_timeout_s=1800.0), clock)


def test_a_bad_machine_is_set_aside_for_longer_each_time_and_ends_no_job(hosts: HostHealth, clock: Clock) -> None:
    bad = FLEET[0]
    pauses = []
    for _ in range(12):
        hosts.record_failure(bad, "no GPU")
        assert hosts.problem(FLEET) is None
        pauses.append(hosts.free_at(bad) - clock.now)
        assert list(hosts.set_aside()) == [bad]
        clock.now = hosts.free_at(bad)
        assert not hosts.set_aside()
    assert pauses[:4] == [2, 4, 8, 16] and pauses[-1] == 300
    assert [host for host in FLEET if hosts.free_at(host)] == [bad]
    [listed] = hosts.listing(50_000.0)
    assert listed == {"machine": bad, "failures": 12, "until": 50_000.0, "error": "no GPU"}


def test_a_job_ends_when_every_machine_has_failed_and_says_why(hosts: HostHealth) -> None:
    for host in FLEET[:-1]:
        hosts.record_failure(host, f"{host} has no module x")
        assert hosts.problem(FLEET) is None
    hosts.record_failure(FLEET[-1], "no module x at all")
    problem = hosts.problem(FLEET)
    assert problem is not None and problem.startswith("setup_failed on all of 91 machines (10.0.0.0, ")
    assert problem.endswith(": no module x at all")
    assert len(hosts.listing(0.0)) == MAX_LISTED
    assert hosts.problem([*FLEET, "10.0.1.1"]) is None, "one has joined"


def test_one_machine_alone_has_four_tries(hosts: HostHealth) -> None:
    for _ in range(3):
        hosts.record_failure("here", "cannot load")
        assert hosts.problem(["here"]) is None
    hosts.record_failure("here", "cannot load")
    assert hosts.problem(["here"]) == "setup_failed: cannot load"


def test_an_error_that_would_come_again_counts_for_its_machine_only(hosts: HostHealth) -> None:
    hosts.record_failure("a", "No module named x", is_final=True)
    assert hosts.problem(["a", "b"]) is None
    assert hosts.problem(["a"]) == "setup_failed: No module named x"


def test_a_machine_on_which_a_worker_is_set_up_can_set_up(hosts: HostHealth) -> None:
    hosts.add_worker("w1", "here")
    hosts.record_failure("here", "out of memory")
    hosts.record_success("w1")
    assert not hosts.set_aside()
    for _ in range(9):
        hosts.record_failure("here", "out of memory")
        assert hosts.problem(["here"]) is None
    hosts.record_success("a worker that has ended")
    hosts.remove_worker("w1")
    assert hosts.problem(["here"]) == "setup_failed: out of memory"


def test_failures_without_a_machine_are_the_pools(hosts: HostHealth) -> None:
    for _ in range(4):
        assert hosts.problem(FLEET) is None
        hosts.record_failure(UNKNOWN, "no cluster")
    assert hosts.problem(FLEET) == "setup_failed: no cluster"
    assert hosts.listing(0.0) == [] and not hosts.is_changed


def test_a_job_that_nothing_could_set_up_in_time_ends_though_machines_are_left(hosts: HostHealth, clock: Clock) -> None:
    hosts.record_failure("a", "no GPU")
    clock.now += 1801
    hosts.record_failure("a", "no GPU")
    assert hosts.problem(["a", "a full one"]) == "setup_failed: no GPU"


# GPUs.


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(devices, "_count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2", ("2",)),
        ("3,1", ("3", "1")),
        ("3, 1 ,-1,0", ("3", "1")),
        ("1,1,2", ("1",)),
        ("GPU-8f1c,GPU-77aa", ("GPU-8f1c", "GPU-77aa")),
        ("MIG-1b,MIG-GPU-2/1/0", ("MIG-1b", "MIG-GPU-2/1/0")),
    ],
)
@pytest.mark.usefixtures("four")
def test_a_mask_names_the_gpus_as_cuda_reads_it(mask: str | None, visible: tuple[str, ...]) -> None:
    assert visible_devices(mask) == visible


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, {0, 1, 2, 3}),  # it chooses when it starts
        ({"device": "cuda"}, {0, 1, 2, 3}),
        ({"device": "cuda:1"}, {1}),
        ({"device": "cpu"}, set()),
        ({"backend": "fake"}, set()),
        ({"role": "batch-worker"}, set()),
        ({"engines": 0}, set()),
        ({"engines": 2}, {0}),
        ({"deterministic": True}, {0}),
        ({"samplers": 1, "device": "cuda:2"}, {2}),
        ({"data_parallel": 2}, {0, 1}),
        ({"tensor_parallel": 2, "context_parallel": 2}, {0, 1, 2, 3}),
        ({"tensor_parallel": 4, "machines": 2}, {0, 1}),
        ({"sampler": "vllm", "device": "cuda:3", "sampler_options": "--tensor-parallel-size=2"}, {0, 1, 3}),
        ({"sampler": "sglang", "device": "cuda:1", "sampler_options": "--tp 2 --mem 0.5"}, {0, 1}),
        ({"sampler": "vllm", "device": "cuda:1", "sampler_url": "http://x"}, {1}),
    ],
)
def test_the_gpus_of_engines_follow_from_their_settings(
    changes: dict[str, object], used: set[int], tmp_path: Path
) -> None:
    assert set(engine_positions(Settings(data_dir=tmp_path, **changes), 4)) == used  # type: ignore[arg-type]


POOL = "pool: {workers: 3}\nresources: {accelerators: 'H100:1'}\n"


def gpu_pool(tmp_path: Path, **changes: object) -> PoolSpec:
    (tmp_path / "gpu.yaml").write_text(POOL)
    settings = Settings(data_dir=tmp_path, batch_pools=(f"gpu={tmp_path}/gpu.yaml",), **changes)  # type: ignore[arg-type]
    return coordinators.pools_of(settings)["gpu"]


def job(**needs: object) -> JobSpec:
    return JobSpec("", {"format": "items", "path": "x"}, [], 1, **needs)  # type: ignore[arg-type]


@pytest.mark.usefixtures("four")
def test_workers_get_the_visible_gpus_that_no_engine_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    spec = gpu_pool(tmp_path, device="cuda:1")
    assert spec.slots == 2
    pool = LocalPool(spec, JobLogs(tmp_path))
    masks = [pool._environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(spec.slots)]
    assert masks == ["GPU-a", "GPU-c"]
    assert [pool.host_of(slot).rpartition(", ")[2] for slot in range(2)] == ["GPU GPU-a", "GPU GPU-c"]
    assert len(pool.hosts(job())) == 2
    without = LocalPool(coordinators.pools_of(Settings(data_dir=tmp_path, device="cuda:1"))["local"], JobLogs(tmp_path))
    assert without._environment(None) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-c"}, "no worker sees the engine's"
    idle = LocalPool(coordinators.pools_of(Settings(data_dir=tmp_path, device="cpu"))["local"], JobLogs(tmp_path))
    assert idle._environment(None) == {}


@pytest.mark.usefixtures("four")
def test_without_a_mask_all_gpus_are_visible_by_their_indices(tmp_path: Path) -> None:
    spec = gpu_pool(tmp_path, device="cuda:0")
    assert spec.devices == Devices(("0", "1", "2", "3"), ("0",)) and spec.slots == 3
    assert spec.devices.of_slot(2, 1) == ("3",)
    assert most_workers(spec, job()) > 0


@pytest.mark.parametrize(
    ("mask", "changes", "words"),
    [
        ("", {"device": "cpu"}, "the server sees none"),
        ("0", {"device": "cuda:0"}, "of which its engines may use 0"),
        ("GPU-a,GPU-b", {}, "of which its engines may use GPU-a, GPU-b. Leave GPUs to the workers with --device"),
    ],
)
@pytest.mark.usefixtures("four")
def test_a_pool_without_a_gpu_to_give_refuses_jobs_with_the_reason(
    mask: str, changes: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    spec = gpu_pool(tmp_path, **changes)
    assert spec.slots == 0
    with pytest.raises(UserError, match="the pool 'gpu' cannot run a job") as refused:
        most_workers(spec, job())
    assert words in str(refused.value)
    assert devices_of(Settings(data_dir=tmp_path, device="cpu")).engines == ()
