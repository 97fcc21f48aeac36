"""`tinsmith up`, `status` and `down`: engines, samplers and batch workers on a Ray cluster (`tinsmith[ray]`)."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tinsmith.auth.signing import load_secret
from tinsmith.cli.remote import AsJson, output, plain_table, print_json, print_table
from tinsmith.cluster.ray.scaling import (
    BATCH_WORKER,
    ENGINE,
    SAMPLER,
    Fleet,
    Resources,
    Role,
    Rule,
    parse_counts,
    parse_resources,
)
from tinsmith.errors import SettingsError
from tinsmith.settings import Settings, load, portable
from tinsmith.settings.environment import prepare_ray, ray_root
from tinsmith.storage.stores import make_private

if TYPE_CHECKING:
    from types import ModuleType

LOCAL = "local"
ADDRESS_FILE = "ray.address"
TOKEN_FILE = "ray.token"
"""Files in the data directory while `tinsmith up --ray local` runs: the cluster's address and its token."""
WATCH_S = 1.0
REACH_S = 5.0
MAX_DIRECTORY = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Most characters of Ray's directory: Linux allows 107 in the path of a socket, and Ray appends the rest."""


DataDir = Annotated[Path | None, typer.Option(help="The servers' data directory. Default: ~/.tinsmith.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="HOST:PORT of the cluster's head. Default: the cluster of `up --ray local`."
    ),
]
Count = Annotated[str, typer.Option(metavar="MIN[:MAX]", help="Number of processes; scaled by waiting work.")]
Cpus = Annotated[float, typer.Option(min=0, help="CPUs and threads of each.")]
Gpus = Annotated[float, typer.Option(min=0, help="GPUs of each, on one node.")]
Others = Annotated[
    list[str] | None, typer.Option(metavar="NAME=AMOUNT", help="Other Ray resources of each; repeat it.")
]
Work = Annotated[float, typer.Option(min=1, help="Waiting work per process before one is added.")]


def up(  # noqa: PLR0913 - one parameter a flag
    ray: Annotated[str, typer.Option(metavar="ADDRESS|local", help="HOST:PORT of a cluster's head, or local.")] = LOCAL,
    engines: Count = "1",
    samplers: Count = "0",
    batch_workers: Count = "0",
    engine_cpus: Cpus = 1.0,
    engine_gpus: Gpus = 0.0,
    engine_resource: Others = None,
    machines: Annotated[
        int | None, typer.Option(min=1, help="Nodes of each engine, with these resources each.")
    ] = None,
    sampler_cpus: Cpus = 1.0,
    sampler_gpus: Gpus = 0.0,
    sampler_resource: Others = None,
    batch_worker_cpus: Cpus = 1.0,
    batch_worker_gpus: Gpus = 0.0,
    batch_worker_resource: Others = None,
    tokens_per_engine: Work = 131_072,
    tokens_per_sampler: Work = 131_072,
    batches_per_worker: Work = 16,
    up_after: Annotated[float, typer.Option(min=0, help="Seconds of higher demand before one is added.")] = 10.0,
    down_after: Annotated[float, typer.Option(min=0, help="Seconds of lower demand before one is removed.")] = 300.0,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="[NAME=]DIR_OR_ID", help="As for `serve`.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="As for `serve`.")] = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once they are requested.")] = False,
) -> None:
    """Run engines, samplers and batch workers on a Ray cluster, scaled by demand.

    With `--ray local` everything ends with this command; on a cluster, with `tinsmith down`."""
    flags = {"models": tuple(model) if model else None, "backend": backend, "data_dir": data_dir, "machines": machines}
    settings = load({name: value for name, value in flags.items() if value is not None})
    _check_machines(settings, engine_gpus, is_local=ray == LOCAL)
    after = up_after, down_after
    engine = replace(_resources(engine_cpus, engine_gpus, engine_resource), machines=settings.machines)
    sampler = _resources(sampler_cpus, sampler_gpus, sampler_resource)
    worker = _resources(batch_worker_cpus, batch_worker_gpus, batch_worker_resource)
    roles = {
        ENGINE: _role("--engines", engines, tokens_per_engine, after, engine),
        SAMPLER: _role("--samplers", samplers, tokens_per_sampler, after, sampler),
        BATCH_WORKER: _role("--batch-workers", batch_workers, batches_per_worker, after, worker),
    }
    fleet = _fleet(settings, roles)
    if ray == LOCAL:
        cluster = _cluster(_make_token(settings.resolved_data_dir))
        _run_local(cluster, settings, fleet, as_json)
        return
    cluster = _cluster(None)
    _check_head(ray)
    cluster.connect(ray)
    fleet = fleet.with_ray_address(ray)
    try:
        _refuse_sqlite(settings, cluster.num_machines())
        cluster.start_controller(fleet)
        _announce(fleet, ray, as_json)
    finally:
        cluster.disconnect()


def down(
    ray: Address = None,
    data_dir: DataDir = None,
    patience: Annotated[float, typer.Option(min=0, help="Grace period for draining, in seconds.")] = 120,
    as_json: AsJson = False,
) -> None:
    """Drain and remove everything that `tinsmith up` started."""
    with _connect(ray, data_dir) as cluster:
        killed = cluster.stop_all(patience)
    if as_json:
        typer.echo(json.dumps({"killed": killed}))
    elif killed:
        output.print(f"killed before they had drained: {', '.join(killed)}")
    if killed:
        raise typer.Exit(1)


def status(ray: Address = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show what is running and waiting on a cluster. Exits 1 if no controller is running."""
    with _connect(ray, data_dir) as cluster:
        seats, is_controlled, controller_report = (
            cluster.RayCluster().seats(),
            cluster.has_controller(),
            cluster.report(),
        )
    if as_json:
        rows = [{name: getattr(seat, name) for name in seat.__slots__} | {"role": seat.role} for seat in seats]
        print_json({"controller": is_controlled, "processes": rows, **controller_report})
    else:
        table = plain_table("process", "state", "node", "pid", "restarts", "")
        for seat in sorted(seats, key=lambda process: (process.role, process.index)):
            table.add_row(
                seat.name, seat.state, seat.node, str(seat.pid or ""), str(seat.restarts), escape(seat.detail)
            )
        print_table(table)
        for role, waiting in (controller_report.get("waiting") or {}).items():
            amounts = ", ".join(f"{amount:,.0f} {base}".strip() for base, amount in waiting.items() if amount)
            output.print(f"{role}: {controller_report['wanted'].get(role, 0)} planned; waiting: {amounts or 'nothing'}")
    if not is_controlled:
        raise typer.Exit(1)


def _role(flag: str, counts: str, work_per_process: float, after: tuple[float, float], resources: Resources) -> Role:
    return Role(Rule(*parse_counts(flag, counts), work_per_process, *after), resources)


def _resources(cpus: float, gpus: float, custom_resources: list[str] | None) -> Resources:
    return Resources(cpus, gpus, parse_resources("a resource", custom_resources or []))


def _fleet(settings: Settings, roles: dict[str, Role]) -> Fleet:
    from tinsmith.base_models import nano

    names = tuple(entry.partition("=")[0] for entry in settings.models) or (nano.MODEL_NAME,)
    configured = settings.signing_secret.get_secret_value()
    if not configured:
        make_private(settings.resolved_data_dir)
    key = b"" if configured else load_secret("", settings.resolved_data_dir)
    return Fleet(roles, names, portable(settings), key)


def _check_machines(settings: Settings, gpus: float, *, is_local: bool) -> None:
    """Raises SettingsError."""
    if settings.loads_on_demand:
        raise SettingsError(
            "TINSMITH_MODELS_FROM and TINSMITH_ALLOW_MODELS are for `tinsmith serve`; name the base models of a Ray "
            "cluster with --model"
        )
    if settings.machines > 1 and is_local:
        raise SettingsError(f"--machines is {settings.machines}, and --ray local has one; pass --ray HOST:PORT")
    if gpus and settings.num_ranks > 1 and settings.num_ranks != settings.machines * gpus:
        raise SettingsError(
            f"the degrees of parallelism need {settings.num_ranks} devices, but --machines {settings.machines} and "
            f"--engine-gpus {gpus:g} reserve {settings.machines * gpus:g}; change one of them"
        )


def _refuse_sqlite(settings: Settings, num_machines: int) -> None:
    if num_machines > 1 and settings.resolved_database_url.startswith("sqlite"):
        raise SettingsError(
            f"the cluster has {num_machines} machines, but the database is a file on one of them; set "
            "TINSMITH_DATABASE_URL to a Postgres database that all machines can reach"
        )


def _make_token(data_dir: Path) -> Path:
    """Make a new token file. Without a token, other users of this machine could run code on the cluster."""
    make_private(data_dir)
    path = data_dir / TOKEN_FILE
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _check_head(address: str) -> None:
    """Raise SettingsError within REACH_S if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://") or not port.isdecimal():
        return  # the connection refuses it with a reason
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"--ray is {address!r}, where nothing responds ({error}); start the head with `ray start --head`, or pass "
            "--ray local for a cluster on this machine"
        ) from None


def _cluster(token_path: Path | None) -> ModuleType:
    """Import the module that uses Ray, which is optional and slow to import. Raises SettingsError."""
    prepare_ray(token_path)
    try:
        from tinsmith.cluster.ray import cluster
    except ImportError as error:
        raise SettingsError(f"this needs Ray ({error}): pip install 'tinsmith[ray]'") from None
    return cluster


@contextlib.contextmanager
def _connect(address: str | None, data_dir: Path | None) -> Iterator[Any]:
    settings = load({"data_dir": data_dir} if data_dir else {})
    data = settings.resolved_data_dir
    cluster = _cluster(None if address else data / TOKEN_FILE)
    head = address or _local_address(data)
    _check_head(head)
    cluster.connect(head)
    try:
        yield cluster
    finally:
        cluster.disconnect()


def _local_address(data_dir: Path) -> str:
    try:
        return (data_dir / ADDRESS_FILE).read_text().strip()
    except FileNotFoundError:
        raise SettingsError(
            f"no `tinsmith up --ray local` runs with {data_dir}; pass --ray HOST:PORT, the address of a cluster's head"
        ) from None


def _run_local(cluster: ModuleType, settings: Settings, fleet: Fleet, as_json: bool) -> None:
    """Run a local cluster until Ctrl-C, SIGTERM or `tinsmith down`."""
    file = settings.resolved_data_dir / ADDRESS_FILE
    stop = threading.Event()
    directory = tempfile.mkdtemp(prefix="ts-", dir=ray_root())
    try:
        if len(directory) > MAX_DIRECTORY:
            raise SettingsError(
                f"RAY_TMPDIR is {ray_root()!r}, too long for Ray's sockets; set a shorter one, such as /tmp"
            )
        address = cluster.start_local(fleet, directory)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, lambda _signal, _frame: stop.set())
        cluster.start_controller(fleet.with_ray_address(address))
        file.write_text(address)
        _announce(fleet, address, as_json)
        while not stop.wait(WATCH_S) and cluster.has_controller():
            pass
        if stop.is_set():
            cluster.stop_all()
        else:  # `tinsmith down` stopped the controller and drains
            while cluster.RayCluster().seats():
                stop.wait(WATCH_S)
    finally:
        for path in (file, settings.resolved_data_dir / TOKEN_FILE):
            path.unlink(missing_ok=True)
        cluster.disconnect()
        shutil.rmtree(directory, ignore_errors=True)


def _announce(fleet: Fleet, address: str, as_json: bool) -> None:
    counts = {name: [role.rule.minimum, role.rule.maximum] for name, role in fleet.roles.items()}
    if as_json:
        typer.echo(json.dumps({"ray": address, "models": list(fleet.base_models), "roles": counts}))
        return
    text = ", ".join(f"{name} {lower}:{upper}" for name, (lower, upper) in counts.items() if upper)
    output.print(f"{text} at {address}, for {', '.join(fleet.base_models)}; `tinsmith status` shows their state")
