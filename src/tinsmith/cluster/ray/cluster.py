"""The only module that imports Ray: shells and the controller as detached, named actors.

Each process has a placement group, which reserves its resources on one node, counts as demand for Ray's autoscaler
while no node has room, and is rescheduled when its node is lost. That of an engine with several machines has a bundle
for each, on a node of its own, and an actor in each bundle; the controller sees the first. Detached actors outlive
their creator; Ray restarts dead ones with the same arguments. The object store is not used. Names begin with the role,
and a namespace has one fleet. `settings.prepare_ray` must set Ray's environment before this module is imported.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from typing import Any

import ray
import structlog
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util import get_node_ip_address, list_named_actors
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinsmith.cluster.ray.controller import Controller, RayProcess
from tinsmith.cluster.ray.scaling import ROLES, Fleet, Role
from tinsmith.cluster.ray.shell import DRAIN_S, Shell
from tinsmith.errors import SettingsError, UserError
from tinsmith.runtime.background import start_supervised_thread

NAMESPACE = "tinsmith"
CONTROLLER = "controller"
RANKS_OF = "rank-"
"""Begins the names of the shells of an engine's ranks on its other machines, `rank-engine-0-1`."""
TICK_S = 1.0
ANSWER_S = 3.0
"""Timeout of a query of the shells."""
START_S = 60.0
OBJECT_STORE_BYTES = 80_000_000
"""About Ray's minimum; Tinsmith stores nothing there."""

# Errors of an actor that is unreachable or has ended.
SILENT = (RayActorError, GetTimeoutError)

log = structlog.get_logger()


def connect(address: str) -> None:
    """Connect as a driver on a node of the cluster. Raises SettingsError."""
    if address.startswith("ray://"):
        raise SettingsError(
            f"--ray is {address!r}: the command must run on a node of the cluster; there, give HOST:PORT of its head "
            "(ray:// is a proxy for drivers elsewhere)"
        )
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SettingsError(f"cannot connect to a Ray cluster at {address!r} from this machine: {error}") from None


def start_local(fleet: Fleet, directory: str) -> str:
    """Start a cluster on this machine, which ends with this process, and return its address. Its declared resources
    suffice for the largest fleet, regardless of the machine's."""
    cpus = sum(role.rule.maximum * role.resources.cpus for role in fleet.roles.values())
    custom: dict[str, float] = {}
    for role in fleet.roles.values():
        for name, amount in role.resources.custom.items():
            custom[name] = custom.get(name, 0.0) + amount * role.rule.maximum
    context: Any = ray.init(
        address="local",
        num_cpus=max(1, int(cpus + 0.999)),
        resources=custom or None,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
    )
    return str(context.address_info["gcs_address"])


def disconnect() -> None:
    ray.shutdown()


def num_machines() -> int:
    return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


class RayCluster:
    """The shells of a cluster."""

    def seats(self) -> list[RayProcess]:
        names = [name for name in _names() if name.rpartition("-")[0] in ROLES]
        states = {name: shell.state.remote() for name in names if (shell := _actor(name)) is not None}
        answered, _ = ray.wait(list(states.values()), num_returns=len(states), timeout=ANSWER_S) if states else ([], [])
        ready = {answer.hex() for answer in answered}
        return [_seat(name, answer if answer.hex() in ready else None) for name, answer in states.items()]

    def start(self, name: str, role: Role, fleet: Fleet) -> None:
        resources = role.resources
        bundles = [resources.bundle or {"CPU": 0.001}] * resources.machines
        strategy = "STRICT_PACK" if resources.machines == 1 else "STRICT_SPREAD"  # a bundle is on one node anyway
        group = _group(name) or placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
        for index in reversed(range(resources.machines)):  # an engine that exists has all its ranks
            options = {
                "name": f"{RANKS_OF}{name}-{index}" if index else name,
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "num_cpus": resources.cpus,
                "num_gpus": resources.gpus,
                "resources": dict(resources.custom),
                "max_restarts": -1,
                "max_concurrency": 4,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            arguments = options["name"], name.rpartition("-")[0], fleet.fingerprint, fleet.settings, fleet.signing_key
            leader = partial(_join_address, name) if index else None
            with contextlib.suppress(ValueError):  # another process has started it
                remote: Any = ray.remote(Shell)
                remote.options(**options).remote(*arguments, get_node_ip_address, leader=leader)

    def drain(self, name: str) -> None:
        shell = _actor(name)
        if shell is not None:
            shell.drain.remote()

    def remove(self, name: str) -> None:
        for shell_name in (*(rank for rank in _names() if rank.startswith(f"{RANKS_OF}{name}-")), name):
            if (shell := _actor(shell_name)) is not None:
                ray.kill(shell, no_restart=True)
        group = _group(name)
        if group is not None:
            remove_placement_group(group)


class ControllerActor:
    """The controller's actor, which reconciles once a second while the cluster exists."""

    def __init__(self, fleet: Fleet) -> None:
        from tinsmith.cluster.ray.controller import QueueDepths
        from tinsmith.db.factory import open_database

        database = open_database(str(fleet.settings["database_url"]), connections=1)
        has_samplers = "sampler" in fleet.roles and fleet.roles["sampler"].rule.maximum > 0
        depths = QueueDepths(database, fleet.base_models, has_samplers)
        self._controller = Controller(fleet, RayCluster(), depths.read, time.monotonic)
        self._start()

    def _start(self) -> None:
        start_supervised_thread("controller", self._run, threading.Event().wait)  # as long as the actor lives

    def _run(self) -> None:
        while True:
            try:
                self._controller.tick()
            except (RayError, RuntimeError) as error:
                log.warning("the cluster cannot be read; trying again", error=repr(error))
            time.sleep(TICK_S)

    def report(self) -> dict[str, Any]:
        return self._controller.report()


def start_controller(fleet: Fleet) -> None:
    """Start the controller, replacing a running one and adopting its processes. Raises UserError if it fails."""
    stop_controller()
    options = {"name": CONTROLLER, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    remote: Any = ray.remote(ControllerActor)
    controller = remote.options(**options, max_concurrency=4).remote(fleet)
    try:
        ray.get(controller.report.remote(), timeout=START_S)
    except SILENT as error:
        with contextlib.suppress(RayError):
            ray.kill(controller, no_restart=True)
        raise UserError(f"the controller did not start on the cluster: {error}") from None


def stop_controller() -> None:
    """Stop the controller, so that no process is started or drained; returns when its name is free."""
    controller = _actor(CONTROLLER)
    if controller is not None:
        ray.kill(controller, no_restart=True)
        while CONTROLLER in _names():
            time.sleep(0.05)


def has_controller() -> bool:
    return CONTROLLER in _names()


def report() -> dict[str, Any]:
    """The controller's last report; empty if no controller answers."""
    controller = _actor(CONTROLLER)
    if controller is None:
        return {}
    try:
        return ray.get(controller.report.remote(), timeout=ANSWER_S)
    except SILENT:
        return {}


def stop_all(patience_s: float = DRAIN_S) -> list[str]:
    """Drain all processes in parallel and remove them; returns the names of those that did not end in time."""
    stop_controller()
    cluster = RayCluster()
    deadline = time.monotonic() + patience_s
    late: list[str] = []
    while seats := cluster.seats():
        over = time.monotonic() > deadline
        for seat in seats:
            if seat.state == "ended" or over:
                late += [seat.name] if seat.state != "ended" else []
                cluster.remove(seat.name)
            elif seat.state not in ("draining", "silent"):
                cluster.drain(seat.name)
        if over:
            break
        time.sleep(0.1)
    return late


def _names() -> list[str]:
    actors: Any = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def _actor(name: str) -> Any:  # noqa: ANN401  an actor handle has the methods of its class
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _join_address(engine: str) -> str:
    """Where an engine accepts ranks of other machines; empty while it does not."""
    with contextlib.suppress(*SILENT):
        if (shell := _actor(engine)) is not None:
            answer: Any = ray.get(shell.state.remote(), timeout=ANSWER_S)
            return str(answer["join"])
    return ""


def _group(name: str) -> Any:  # noqa: ANN401
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _seat(name: str, answer: Any) -> RayProcess:  # noqa: ANN401
    if answer is not None:
        with contextlib.suppress(*SILENT):
            state: Any = ray.get(answer, timeout=ANSWER_S)
            fields = {key: state[key] for key in ("state", "fingerprint", "pid", "restarts", "detail")}
            return RayProcess(name, node=state["host"], **fields)
    return RayProcess(name, "silent")
