"""The `tinsmith` command. Each subcommand imports its dependencies when it runs, so that `--help` is instant.

With `--json`, standard output contains only JSON. Exit status: 0 for success, 1 for a negative result (a job failed, or
a check found a problem), 2 if the command was refused, 130 if the user stopped waiting.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape

from tinsmith import __version__
from tinsmith.cli import batch as batch_cli
from tinsmith.cli import checkpoints as checkpoints_cli
from tinsmith.cli import database as database_cli
from tinsmith.cli import keys as keys_cli
from tinsmith.cli import profile as profile_cli
from tinsmith.cli import runs as runs_cli
from tinsmith.cli import samplers as samplers_cli
from tinsmith.cli import up as up_cli
from tinsmith.cli.lines import describe_models, report_server
from tinsmith.cli.remote import AsJson, json_object, plain_table, print_json
from tinsmith.errors import SettingsError
from tinsmith.plan.versions import INSTALL_ENGINE, find_cuda_obstacle, list_missing_packages
from tinsmith.runtime.malloc import importing
from tinsmith.settings import FORMER_NAMES, Settings, list_former_values, load
from tinsmith.settings.environment import client_address

if TYPE_CHECKING:
    from tinsmith.cli.plan import PlanRequest
    from tinsmith.cluster.engine_process import EngineProcess

app = typer.Typer(
    help="Tinsmith: the Tinker API on your own machine.", no_args_is_help=True, pretty_exceptions_show_locals=False
)
output = Console(emoji=False)
errors = Console(stderr=True, emoji=False)

MODEL_HELP = "A base model to serve; repeat it. Default: tinsmith/nano."
SERVE_OPTIONS = {
    "Base models": (
        "models",
        "models_from",
        "allow_models",
        "idle_minutes",
        "on_demand_bytes",
        "backend",
        "vision",
        "tool_parser",
        "deterministic",
    ),
    "Devices": (
        *("device", "dtype", "quantize", "data_parallel", "tensor_parallel", "context_parallel", "expert_parallel"),
        "pipeline_parallel",
        "shard_base",
        "profile",
    ),
    "Sampling": (
        *("sampler", "sampler_url", "sampler_options", "sampler_loaded_adapters", "sampler_sequences"),
        "kv_cache_bytes",
    ),
    "Processes and addresses": ("role", "engines", "samplers", "machines", "host", "port", "health_port", "peer_host"),
    "Storage": ("data_dir", "database_url", "storage_dir"),
    "Sessions": ("session_timeout_s", "session_sweep_s"),
    "Output": ("log_level",),
}
"""The settings that are flags of `serve`, by group in its help."""

FLAGS = {"allow_models": "--allow-model"}
"""The flags whose names are not those of their settings; each may be repeated."""


def settings_options(*names: str, **groups: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each setting to a command, documented by the setting's docstring. `groups` are panels of its
    help. The command is called with `flags`, the options that the user set, and its own parameters.
    """
    panels: dict[str, str | None] = dict.fromkeys(names)
    panels |= {name: group for group, members in groups.items() for name in members}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values: object) -> None:
            flags = {name: values.pop(name) for name in panels}
            return command({name: value for name, value in flags.items() if value not in (None, [])}, **values)

        parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        call.__dict__["__signature__"] = inspect.Signature(
            [*(_option(*panel) for panel in panels.items()), *parameters]
        )
        call.__annotations__ = {}
        return call

    return decorate


def _option(name: str, group: str | None) -> inspect.Parameter:
    field = Settings.model_fields[name]
    kind = next(
        (kind for kind in (bool, int, float, Path) if kind in (field.annotation, *get_args(field.annotation))), str
    )
    flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
    if field.default is True:
        flag += f"/--no-{name.replace('_', '-')}"
    default = "" if field.default in ("", None) else f" Default: {str(field.default).lower()}."
    help_text = escape(" ".join((field.description or "").split()) + default)
    option = typer.Option(flag, help=help_text, rich_help_panel=group)
    model = typer.Option("--model", "-m", metavar="[NAME=]DIR_OR_ID", help=MODEL_HELP, rich_help_panel=group)
    is_repeated = get_origin(field.annotation) is tuple
    repeated = Annotated[list[str] | None, model if name == "models" else option]
    annotation = repeated if is_repeated else Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@app.command()
@settings_options(**SERVE_OPTIONS)
def serve(
    flags: dict[str, object],
    base_models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Base models, as with --model.", show_default=False)
    ] = None,
    backend_options: Annotated[
        str, typer.Option(metavar="JSON", help='More settings by name, such as \'{"memory_budget": "6GiB"}\'.')
    ] = "{}",
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print a line of work each minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when it is ready.")] = False,
) -> None:
    """Serve base models to the tinker SDK until Ctrl-C, or run one role of a server."""
    if base_models:
        flags["models"] = [*cast("list[str]", flags.get("models", [])), *base_models]
    serve_until_signal(load(_json_settings(backend_options) | flags), as_json=as_json, quiet=quiet)


def _json_settings(text: str) -> dict[str, object]:
    """Parse --backend-options. Raises SettingsError unless the text is a JSON object of settings."""
    options = json_object("--backend-options", text, "a JSON object of settings")
    settings = list_former_values(options) | {name: options[name] for name in options if name not in FORMER_NAMES}
    if unknown := sorted(settings.keys() - Settings.model_fields.keys()):
        raise SettingsError(f"--backend-options names {unknown[0]!r}, which is not a setting; see docs/settings.md")
    return settings


app.command()(database_cli.migrate)
app.add_typer(keys_cli.app, name="keys")
app.add_typer(samplers_cli.app, name="samplers")
app.add_typer(runs_cli.app, name="runs")
app.command()(profile_cli.profile)
app.add_typer(batch_cli.app, name="batch")
app.add_typer(checkpoints_cli.app, name="checkpoints")
app.command()(up_cli.up)
app.command()(up_cli.status)
app.command()(up_cli.down)


@app.command()
def demo(
    data_dir: Annotated[Path | None, typer.Option(help="Data directory. Default: a new one.")] = None,
    stay: Annotated[
        bool | None, typer.Option("--stay/--exit", help="Keep serving afterwards. Default: in a terminal.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Run supervised fine-tuning and reinforcement learning with the official SDK."""
    from tinsmith.cli.demo import run_demo

    stays = sys.stdout.isatty() if stay is None else stay
    run_demo(errors if as_json else output, data_dir, stay=stays, on_done=print_json if as_json else None)


@app.command()
@settings_options("models", "data_dir")
def rank(
    flags: dict[str, object],
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the engine accepts ranks.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine. Default: one for each GPU.")] = None,
) -> None:
    """Run this machine's ranks of an engine on another machine."""
    from tinsmith.cli.rank import run_ranks

    stopping = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda _signal, _frame: stopping.set())
    raise typer.Exit(run_ranks(load(flags), join, ranks, stopping, once=False))


@app.command()
@settings_options("models", "data_dir")
def doctor(  # noqa: PLR0913 - one parameter a flag
    flags: dict[str, object],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A base model to plan for: its directory, config.json or id."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices to plan for. Default: this machine's.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each device, such as 80GB. Default: this machine's.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 32,
    adapters: Annotated[int, typer.Option(help="Adapters in training at a time.")] = 1,
    context: Annotated[int | None, typer.Option(help="Longest sequence. Default: the model's, up to 8192.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the base model: auto, float32 or bfloat16.")] = None,
    quantize: Annotated[str, typer.Option(help="Frozen linear layers and experts: off, int8, nf4 or fp8.")] = "off",
    tensor_parallel: Annotated[int | None, typer.Option(help="Devices that share each layer. Default: chosen.")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="Groups that share each step. Default: chosen.")] = None,
    context_parallel: Annotated[
        int | None, typer.Option(help="Devices that share each sequence in training. Default: chosen.")
    ] = None,
    expert_parallel: Annotated[
        int | None, typer.Option(help="Devices that share the experts. Default: chosen.")
    ] = None,
    pipeline_parallel: Annotated[
        int | None, typer.Option(help="Stages of layers, each on a device. Default: chosen.")
    ] = None,
    shard_base: Annotated[bool, typer.Option("--shard-base", help="Share one base among the groups.")] = False,
    machines: Annotated[int | None, typer.Option(help="Machines of these devices.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Start the plan's ranks and measure them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check this machine, or plan where MODEL fits."""
    if model is not None:
        from tinsmith.cli.plan import PlanRequest

        degrees = (tensor_parallel, data_parallel, shard_base, context_parallel, expert_parallel, pipeline_parallel)
        request = PlanRequest(model, gpus, memory, rank, context, adapters, dtype, quantize, *degrees, machines)
        _show_plan(request, load(flags) if measure else None, as_json=as_json)
        return
    from tinsmith.cli.doctor import examine

    findings = examine(load(flags))
    if as_json:
        print_json([{"good": row.good, "what": row.subject, "detail": row.detail} for row in findings])
        raise typer.Exit(0 if all(finding.good for finding in findings) else 1)
    table = plain_table("", "what", "finding")
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.good else "[red]no[/]", finding.subject, escape(finding.detail))
    output.print(table)
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


@app.command()
def bench(
    url: Annotated[
        list[str] | None,
        typer.Option(help="A server; repeat it. Default: TINKER_BASE_URL, or port 8000 of this machine."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="The server's base model, once or for each --url. Default: its first.")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="The server's API key, once or for each --url. Default: TINKER_API_KEY.")
    ] = None,
    dialect: Annotated[
        list[str] | None,
        typer.Option(help="sdk, or json for servers of earlier SDKs and keys without tml-; once or for each --url."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of each measure.")] = 10,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters that are trained.")] = 16,
    timeout: Annotated[float, typer.Option(min=1, help="Most seconds to wait for a response.")] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Time the same work on Tinker-compatible servers. Exits 1 if a server failed a measure."""
    from tinsmith.cli.bench import bench_as_json, build_targets, run_bench

    default_url, default_key = client_address()
    targets = build_targets(url or [default_url], model or [], key or [default_key], dialect or [])
    if as_json:
        is_complete, result = bench_as_json(targets, runs=runs, rank=rank, patience_s=timeout)
        typer.echo(json.dumps(result, indent=2))
    else:
        is_complete = run_bench(output, targets, runs=runs, rank=rank, patience_s=timeout)
    if not is_complete:
        raise typer.Exit(1)


def _show_plan(request: PlanRequest, measured: Settings | None, *, as_json: bool) -> None:
    """With `measured`, the settings of the ranks, these are started and measured."""
    from tinsmith.cli import plan as report
    from tinsmith.cli.doctor import measure_rates
    from tinsmith.cli.plan import plan_of

    plan = plan_of(request)
    if measured is not None and plan.fits:
        speeds = list(report.describe_measurement(plan, measure_rates(measured, plan)))
    else:
        speeds = list(report.speeds(plan))
    advice, command = report.recommend(request, plan)
    if as_json:
        fields = report.as_json(plan) | {"advice": advice, "command": command, "speeds": speeds}
        print_json(fields | {"launches": report.launches(request, plan)})
        raise typer.Exit(0 if plan.fits else 1)
    output.print(escape(report.summary(plan)), highlight=False, soft_wrap=True)
    table = plain_table("memory of each device", "")
    for label, size in report.rows(plan):
        table.add_row(label, size)
    output.print(table)
    colour = "green" if plan.fits else "red"
    output.print(f"[{colour}]{escape(report.headline(plan))}[/]", highlight=False, soft_wrap=True)
    for reason in plan.reasons:
        output.print(f"  {escape(reason)}", highlight=False, soft_wrap=True)
    for line in speeds:
        output.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    if advice:
        output.print(f"  {escape(advice)}", highlight=False, soft_wrap=True)
    for target, line in report.launches(request, plan).items():
        output.print(f"  {target}: {escape(line)}", highlight=False, soft_wrap=True)
    output.print(f"[bold]{escape(command)}[/]", highlight=False, soft_wrap=True)
    if not plan.fits:
        raise typer.Exit(1)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        commit = _read_commit()
        typer.echo(f"tinsmith {__version__}{f' ({commit[:12]})' if commit else ''}")
        raise typer.Exit


def _read_commit() -> str:
    """The commit that the package was built from, or that of the checkout it is in; empty if there is neither."""
    package = Path(__file__).parents[1]
    with contextlib.suppress(OSError):
        return (package / "COMMIT").read_text(encoding="utf-8").strip()
    checkout = package.parents[1]
    if not (checkout / ".git").exists():
        return ""
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Define the options of the command itself."""


def serve_until_signal(settings: Settings, *, as_json: bool, quiet: bool = True) -> None:
    """Run the process that the settings describe until a signal ends it. Raises SettingsError."""
    from tinsmith.cluster.engine_process import EngineProcess

    if settings.backend == "torch" and settings.num_torch_processes and (missing := list_missing_packages()):
        fix = "to run a server whose engines are elsewhere, pass --role server"
        raise SettingsError(f"an engine needs {_engine_extra(missing)}; {fix}")
    if settings.device.startswith("cuda") and settings.num_torch_processes and (obstacle := find_cuda_obstacle()):
        raise SettingsError(f"device {settings.device!r} is unavailable: {obstacle}; use 'auto' or 'cpu'")
    prestarted = EngineProcess.prestart(settings)
    try:
        _serve_with(settings, prestarted, as_json=as_json, quiet=quiet or as_json)
    finally:
        if prestarted:
            prestarted.discard()


def _serve_with(settings: Settings, prestarted: EngineProcess | None, *, as_json: bool, quiet: bool) -> None:
    with importing():
        from tinsmith.server.process import build
        from tinsmith.telemetry.logs import configure_logs

    configure_logs(settings.log_level, settings.log_format)
    server = build(settings, prestarted)

    def announce(url: str) -> None:
        models = [shape.name for shape in server.bases]
        if as_json:
            fields = {"url": url, "models": models, "data_dir": str(settings.resolved_data_dir), "role": settings.role}
            typer.echo(json.dumps(fields | {"takes_any_key": server.accepts_anyone}))
            return
        names = describe_models(server.bases)
        if not settings.answers_clients:
            output.print(f"[bold]Tinsmith {__version__}[/] runs the role {settings.role} for {names}", highlight=False)
            output.print(f"  data in {escape(str(settings.resolved_data_dir))}", highlight=False, soft_wrap=True)
            output.print("Press Ctrl-C to stop.", highlight=False)
            return
        output.print(f"[bold]Tinsmith {__version__}[/] serves {names} at [bold]{url}[/]")
        key = "tml-local" if server.accepts_anyone else "..."
        for label, line in (
            ("tinker SDK", f"export TINKER_BASE_URL={url} TINKER_API_KEY={key}"),
            ("dashboard", f"{url}/"),
            ("data", f"{settings.resolved_data_dir}"),
            ("API key", "any" if server.accepts_anyone else settings.create_key_command()),
        ):
            output.print(f"  {label:<11} {line}", highlight=False, soft_wrap=True)
        output.print("Press Ctrl-C to stop.", highlight=False)

    def announce_stop(polls: int, engines: int) -> None:
        polls_text = f"answering {polls} long poll(s), then " if polls else ""
        runs = f"waiting for {engines} engine process(es) to save their runs" if engines else "exiting"
        output.print(f"Stopping: {polls_text}{runs}.", highlight=False)

    if not as_json:
        server.on_stop = announce_stop
    if not quiet:
        threading.Thread(target=report_server, args=(server, output), daemon=True).start()
    server.run(announce)


def _engine_extra(packages: list[str]) -> str:
    return f"{' and '.join(packages)}: {INSTALL_ENGINE}"


def _refuse_empty_argument(arguments: Sequence[str]) -> None:
    """Raise SettingsError for an empty argument that is not the value of an option, and for an empty data directory,
    which would mean the current one."""
    for position, (before, argument) in enumerate(pairwise(("", *arguments)), 1):
        is_empty = not argument and (before == "--data-dir" or not before.startswith("-"))
        if is_empty or argument == "--data-dir=":
            command = shlex.join(("tinsmith", *arguments))
            raise SettingsError(f"argument {position} of `{command}` is empty; is a variable of the shell not set?")


def main() -> None:
    """Run the command. A SettingsError, and a package of the extra `engine` that is not installed, print one line
    instead of a traceback."""
    try:
        _refuse_empty_argument(sys.argv[1:])
        app()
    except SettingsError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if error.name == "tinker":
            message = "this command needs tinker: pip install 'tinsmith[demo]'"
        elif error.name in list_missing_packages():
            message = f"this command needs {_engine_extra([error.name])}"
        else:
            raise
    else:
        return
    errors.print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
