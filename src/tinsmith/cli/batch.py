"""`tinsmith batch`: submit, follow, stop, resume and export bulk jobs of a running server.

The server is TINKER_BASE_URL and the key TINKER_API_KEY, as for the SDK. With `--json`, standard output holds JSON
alone. Exit codes: 0 for success, 1 if a job did not succeed, 2 if the request was refused, 130 if the user stopped
waiting (the job goes on). Questions are asked only here, and none with `--yes`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape
from rich.text import Text

from tinsmith.cli.remote import (
    INTERRUPTED,
    AsJson,
    exit_on_errors,
    json_object,
    notes,
    output,
    print_json,
    print_result,
    print_rows,
)
from tinsmith.errors import UserError
from tinsmith.runtime.sizes import format_bytes

if TYPE_CHECKING:
    from tinsmith.batch.client.http import Client, Status
    from tinsmith.batch.formats.registry import InputReader, OutputWriter, Registry

T = TypeVar("T")
NOT_SUCCEEDED = 1
RETRY_TIMEOUT_S = 5.0
"""How long an unreachable server is tried again by commands that do not wait for a job."""
IF_TARGET_EXISTS = ("error", "overwrite", "ask")
IF_EXISTS = (*IF_TARGET_EXISTS, "resume")
TERMINAL_STATUSES = ("SUCCEEDED", "FAILED", "CANCELLED")
MAX_PURGED = 1000
"""The newest jobs that `purge --all` considers: a page of the server's listing."""

app = typer.Typer(help="Bulk jobs: a function over every row of a data set.", no_args_is_help=True)

JobId = Annotated[int, typer.Argument(help="The job's id, as `tinsmith batch list` shows it.", min=1)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer every question with yes.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the job's end.")]
IfExists = Annotated[str, typer.Option(help="If an output exists: error, overwrite, ask, or resume its job.")]
IfTargetExists = Annotated[str, typer.Option(help="If the target exists: error, overwrite or ask.")]


@app.command()
def submit(  # noqa: PLR0913  each is a flag
    source: Annotated[str, typer.Option("--input", "-i", metavar="[FORMAT:]PATH", help="The rows.")],
    outputs: Annotated[
        list[str], typer.Option("--output", "-o", metavar="[FORMAT:]PATH", help="Where results go; repeat it.")
    ],
    function: Annotated[str, typer.Argument(metavar="[FILE.py[:NAME]]", help="The function or operations.")] = "",
    sample: Annotated[str, typer.Option(metavar="MODEL", help="Sample this model instead of running a function.")] = "",
    sample_options: Annotated[str, typer.Option(metavar="JSON", help="Fields of tinsmith.batch.Sample.")] = "{}",
    errors: Annotated[str, typer.Option(metavar="[FORMAT:]PATH", help="Where failed rows go.")] = "",
    batch_size: Annotated[int, typer.Option(help="Rows in a batch.")] = 32,
    pool: Annotated[str, typer.Option(help="The pool of workers.")] = "local",
    fn_kwargs: Annotated[str, typer.Option(metavar="JSON", help="An object of the function's parameters.")] = "{}",
    batched: Annotated[bool, typer.Option("--batched", help="The function takes a list of rows.")] = False,
    rows: Annotated[str, typer.Option(help="one or any: results for each row.")] = "one",
    max_failed_rows: Annotated[float, typer.Option(help="How many rows may fail; below 1, a share of all rows.")] = 0,
    name: Annotated[str, typer.Option(help="A name to show for the job.")] = "",
    weight: Annotated[float, typer.Option(help="Its share of the pool.")] = 1.0,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    resume_from: Annotated[int | None, typer.Option(metavar="JOB", help="Keep the results of this job.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="ROWS", help="Only the first rows.", min=1)] = None,
    option_flags: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Any option of Dataset.map, a text or JSON; repeat it."),
    ] = None,
    if_exists: IfExists = "ask",
    detach: Detach = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Run a function over every row, and wait for the end."""
    from tinsmith.batch.client.dataset import Dataset
    from tinsmith.batch.client.job import Job

    with _client() as client:
        writers = [_writer(output) for output in outputs]
        error_writer = _writer(errors) if errors else None
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "batched": batched or None,
            "fn_kwargs": json_object("--fn-kwargs", fn_kwargs) or None,
            "rows": rows if rows != "one" else None,
            "max_failed_rows": max_failed_rows,
            "name": name,
            "weight": weight,
            "priority": priority,
            "resume_from": resume_from,
            "if_exists": _if_exists(if_exists, [*writers, *([error_writer] if error_writer else [])], yes),
            "errors": error_writer,
            **_parse_assignments(option_flags or []),
        }
        map_options = {name: value for name, value in options.items() if value is not None}
        mapper = _mapper(function, sample, json_object("--sample-options", sample_options))
        data = Dataset(_reader(source))
        data = data if limit is None else data.limit(limit)
        job = data.map(mapper, pool, output=writers, stream=False, client=client, **map_options)
        assert isinstance(job, Job)
        _follow(client, job.job_id, detach, as_json)


@app.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1, max=1000)] = 20, as_json: AsJson = False
) -> None:
    """List jobs, newest first."""
    with _client() as client:
        jobs = client.jobs(limit)

    def row(job: Status) -> tuple[object, ...]:
        batches = f"{job['batch_completed_batches']}/{job['batch_total_batches']}"
        cells = Text.from_markup(_color_status(job["status"])), batches, job["rows_ok"], job["rows_failed"]
        return job["job_id"], job["name"], *cells, job["pool"], _format_time(job["created_at"])

    print_rows(as_json, jobs, ("id", "name", "status", "batches", "rows", "failed", "pool", "created"), row)


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job's progress and outputs."""
    with _client() as client:
        status = client.status(job_id)
    if as_json:
        print_json(status)
        return
    from tinsmith.batch.client.job import first_error_lines, progress_of

    progress = progress_of(status)
    has_estimate = progress.seconds_left is not None and status["status"] not in TERMINAL_STATUSES
    remaining = f", about {progress.seconds_left:.0f} s to go" if has_estimate else ""
    rows_text = f"{progress.rows_ok} ok, {progress.rows_failed} failed, of {progress.rows}"
    lines = {
        "job": f"{job_id} {escape(status['name'])}".strip(),
        "status": _color_status(status["status"]),
        "batches": f"{progress.batches_done} of {progress.batches}{remaining}",
        "rows": f"{rows_text}; {progress.rows_per_second:.0f} a second",
        "tokens": f"{status['tokens_in']} in, {status['tokens_out']} out",
        "pool": f"{escape(status['pool'])}, {len(status['workers'])} workers now",
        "waiting": escape(status["waiting"] or ""),
        **{f"stage {index}": escape(_describe_stage(stage)) for index, stage in enumerate(status["stages"], 1)},
        "created": _format_time(status["created_at"]),
        "started": _format_time(status["started_at"]),
        "ended": _format_time(status["ended_at"]),
        "error": escape(status["error"] or ""),
        **{f"worker {index}": escape(_describe_worker(worker)) for index, worker in enumerate(status["workers"])},
        **{
            f"aside {index}": escape(_describe_machine(machine))
            for index, machine in enumerate(status["machines_set_aside"])
        },
        **{f"output {index}": escape(_describe_output(output)) for index, output in enumerate(status["outputs"])},
    }
    for name, text in lines.items():
        if text:
            output.print(f"[bold]{name:<9}[/] {text}")
    if status["first_error"]:
        output.print(escape("\n".join(first_error_lines(status["first_error"]))))


@app.command()
def logs(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the output of the function, each line with its batch, and the job's events."""
    from tinsmith.batch.client.job import follow_logs

    with _client() as client:
        for line in follow_logs(client, job_id, follow):
            if as_json:
                typer.echo(json.dumps(line))
            else:
                at = datetime.fromtimestamp(line["at"]).strftime("%H:%M:%S") if line["at"] else " " * 8
                batch = "" if line["batch_idx"] is None else f" batch {line['batch_idx']}.{line['attempt_id']}"
                output.print(f"[dim]{at} {line['worker_id'] or 'job'}{batch}[/] {escape(line['text'])}")


@app.command("errors")
def list_errors(
    job_id: JobId,
    full: Annotated[bool, typer.Option("--full", help="Print each row and its traceback, too.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="ROWS", help="Print so many rows; default: all.", min=1)] = None,
    after: Annotated[int, typer.Option(metavar="ROW", help="Begin after this row.", min=-1)] = -1,
    as_json: AsJson = False,
) -> None:
    """Print the failed rows and their errors."""
    from tinsmith.batch.client.job import Job, first_error_lines

    with _client() as client:
        for error in Job(job_id, client).errors(after, limit):
            if as_json:
                typer.echo(json.dumps(error))
            else:
                output.print(f"[bold]row {error['idx']}[/] {escape(error['error_type'])}: {escape(error['message'])}")
                if full:
                    output.print(escape("\n".join(first_error_lines(error))) + "\n")


@app.command()
def cancel(job_id: JobId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Cancel a job. Its results can be exported, and the job resumed."""
    with _client() as client:
        status = client.status(job_id)
        if status["status"] not in TERMINAL_STATUSES:
            progress = f"{status['batch_completed_batches']} of {status['batch_total_batches']} batches are done"
            _confirm(f"End bulk job {job_id}, of which {progress}?", yes)
        status = client.cancel(job_id)
    if as_json:
        print_json(status)
    else:
        output.print(f"bulk job {job_id} is {_color_status(status['status'])}")


@app.command()
def purge(
    job_ids: Annotated[
        list[int] | None, typer.Argument(metavar="[JOB_ID]...", help="Failed or cancelled jobs.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All failed and cancelled jobs.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the parts of failed or cancelled jobs, which cannot be resumed or exported after that."""
    with _client() as client:
        if every == bool(job_ids):
            raise typer.BadParameter("name the jobs to purge, or give --all")
        chosen = job_ids or [
            job["job_id"] for job in client.jobs(MAX_PURGED) if job["status"] in ("FAILED", "CANCELLED")
        ]
        if chosen:
            _confirm(f"Delete the parts of {_count_jobs(chosen)}, which can then not be resumed?", yes)
        purged = [client.purge(job_id) for job_id in chosen]
    print_result(
        as_json, purged, f"the parts of {_count_jobs(chosen)} are being deleted" if chosen else "nothing to delete"
    )


def _describe_machine(machine: Mapping[str, Any]) -> str:
    last = machine["error"].strip().rpartition("\n")[2]
    until = datetime.fromtimestamp(machine["until"]).strftime("%H:%M:%S")
    return f"{machine['machine']} until {until}, after {machine['failures']} failed set-ups: {last}"


def _describe_worker(worker: dict[str, Any]) -> str:
    retries = f", {worker['retried']} of {worker['batches']} batches tried again" if worker["retried"] else ""
    rows_or_state = (
        f"{worker['rows']} rows from {worker['first_row']}{retries}" if worker["batches"] else worker["state"]
    )
    return f"{worker['worker_id']}: {rows_or_state}"


def _parse_assignments(flags: list[str]) -> dict[str, Any]:
    """Options from NAME=VALUE. Raises UserError."""
    values: dict[str, Any] = {}
    for text in flags:
        name, equals, value = text.partition("=")
        if not equals or name in ("output", "client", "errors", "stream"):
            raise UserError(
                f"--option is {text!r}; it must be NAME=VALUE, with an option of Dataset.map that has no flag"
            )
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def _count_jobs(job_ids: list[int]) -> str:
    return f"bulk job {job_ids[0]}" if len(job_ids) == 1 else f"{len(job_ids)} bulk jobs"


@app.command()
def resume(
    job_id: JobId,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="[FORMAT:]PATH", help="New outputs, as many as the job has; repeat it."),
    ] = None,
    format: Annotated[str, typer.Option(help="Another format: jsonl, csv, parquet, txt.")] = "",
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Finish a failed or cancelled job as a new job."""
    from tinsmith.batch.client.job import Job

    with _client() as client:
        writers = [_writer(output) for output in outputs or ()]
        job = Job(job_id, client).resume(format=format or None, output=writers or None)
        _follow(client, job.job_id, detach, as_json)


@app.command()
def export(
    job_id: JobId,
    target: Annotated[str, typer.Argument(metavar="PATH", help="A file, or a directory with a final slash.")],
    output_index: Annotated[int, typer.Option("--output", "-o", help="Number of the job's output.")] = 0,
    if_exists: IfTargetExists = "ask",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write a job's results so far to another place."""
    from tinsmith.batch.client.job import Job
    from tinsmith.batch.formats.lines import LinesWriter

    with _client() as client:
        writers: list[OutputWriter] = [] if target.endswith("/") else [LinesWriter(target)]
        choice = _if_exists(if_exists, writers, yes, IF_TARGET_EXISTS)
        info = Job(job_id, client).export(target, output_index, choice)
    print_result(as_json, info.to_dict(), _describe_output(info.to_dict()))


@app.command()
def pools(as_json: AsJson = False) -> None:
    """List the pools that jobs can run on."""
    with _client() as client:
        rows = client.pools()
    names = "name", "workers", "accelerators_per_worker"
    print_rows(
        as_json,
        rows,
        ("pool", "workers", "accelerators", "jobs"),
        lambda pool: (*(pool[name] for name in names), ", ".join(map(str, pool["jobs"]))),
    )


@app.command()
def task(
    pool: Annotated[str, typer.Argument(metavar="NAME=FILE.yaml", help="A pool whose infra is SkyPilot's.")],
    machines: Annotated[
        int | None, typer.Option(min=1, help="Machines that run each job together. Default: num_nodes of the file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the SkyPilot task whose machines run a pool's jobs, for `sky launch`."""
    import yaml

    from tinsmith.batch.pools.managed import task_envs
    from tinsmith.batch.pools.specs import skypilot_task
    from tinsmith.settings import load

    name, _, path = pool.partition("=")
    settings = load({})
    text = skypilot_task(name, Path(path).expanduser(), machines, task_envs(settings))
    typer.echo(json.dumps(text) if as_json else yaml.safe_dump(text, sort_keys=False), nl=as_json)


@contextmanager
def _client() -> Iterator[Client]:
    """A client of the environment's server. An error ends the command with one line."""
    import httpx

    from tinsmith.batch.client.http import Client

    with exit_on_errors(ValueError, httpx.TransportError), closing(Client(patience_s=RETRY_TIMEOUT_S)) as client:
        yield client


def _follow(client: Client, job_id: int, detach: bool, as_json: bool) -> None:
    """Wait for a job's end and print its outputs; with `detach`, print its id."""
    from tinsmith.batch.client.job import Job, JobFailedError, describe_failure

    job = Job(job_id, client)
    if detach:
        print_result(as_json, {"job_id": job_id}, f"bulk job {job_id} is submitted: `tinsmith batch show {job_id}`")
        return
    client.patience_s = 60.0
    try:
        status = job.wait(progress=not as_json, check=not as_json)
    except JobFailedError as error:
        notes.print(f"[red]error:[/] {escape(describe_failure(error.status, for_shell=True))}")
        raise typer.Exit(NOT_SUCCEEDED) from None
    except KeyboardInterrupt:
        notes.print(f"bulk job {job_id} goes on: `tinsmith batch show {job_id}`, `tinsmith batch cancel {job_id}`")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(status)
        if status["status"] != "SUCCEEDED":
            raise typer.Exit(NOT_SUCCEEDED)
        return
    for entry in status["outputs"]:
        output.print(escape(_describe_output(entry)))


def _mapper(reference: str, model: str, fields: dict[str, Any]) -> Any:  # noqa: ANN401
    """The function or operations of a file, or a Sample of the model. Raises UserError unless one of them is given."""
    if bool(reference) == bool(model):
        raise UserError("name what to run on the rows: either FILE.py:NAME or --sample MODEL")
    if reference:
        if fields:
            raise UserError("--sample-options belong to --sample; a file's operations have their own")
        return _load_function(reference)
    from tinsmith.batch.operations.sample import Sample

    try:
        return Sample(model, **fields)
    except TypeError as error:
        raise UserError(f"--sample-options: {error}") from None


def _load_function(reference: str) -> Any:  # noqa: ANN401
    """The function, class or operations under a name in a file; without a name, the file's only function."""
    import importlib.util

    from tinsmith.batch.client.functions import is_remote_function
    from tinsmith.batch.operations.base import RowOperation

    file, _, name = reference.rpartition(":") if not reference.endswith(".py") else (reference, "", "")
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"there is no Python file {file!r}; write FILE.py or FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error
    if name:
        function = getattr(module, name, None)
        if not (callable(function) or isinstance(function, RowOperation | list)):
            raise UserError(f"{file} has no function and no operations {name!r}")
        return function
    functions = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    }
    marked = {name: value for name, value in functions.items() if is_remote_function(value)}
    candidates = marked or functions
    if len(candidates) != 1:
        raise UserError(f"{file} has {sorted(candidates) or 'no functions'}; name one: {file}:FUNCTION")
    return next(iter(candidates.values()))


def _reader(text: str) -> InputReader:
    from tinsmith.batch.formats import registry

    return _find_format(registry.INPUT_READER_REGISTRY, text)


def _writer(text: str) -> OutputWriter:
    from tinsmith.batch.formats import registry

    return _find_format(registry.OUTPUT_WRITER_REGISTRY, text)


def _find_format(registry: Registry[T], text: str) -> T:
    """The reader or writer of `[FORMAT:]PATH`. The scheme of a URL is not a format."""
    from tinsmith.batch.formats.registry import format_of

    name, colon, path = text.partition(":")
    if colon and name in registry.names():
        return registry.find(name)(path)  # type: ignore[call-arg]
    try:
        return registry.find(format_of(text))(text)  # type: ignore[call-arg]
    except UserError as error:
        names = ", ".join(name for name in registry.names() if name != "collected")  # that one is of dry runs
        raise UserError(f"the format of {text!r} is not known by its ending: write FORMAT:{text} ({names})") from error


def _if_exists(flag: str, writers: list[OutputWriter], yes: bool, choices: Sequence[str] = IF_EXISTS) -> str:
    """The `if_exists` of a job or an export; for `ask`, asks if an output exists."""
    from tinsmith.batch.formats.publishing import check_output

    if flag not in choices:
        raise UserError(f"--if-exists is {flag!r}; it must be one of {', '.join(choices)}")
    if flag != "ask":
        return flag
    for writer in writers:
        try:
            if writer.in_store:
                check_output(writer.path, "error")
        except FileExistsError:
            _confirm(f"Overwrite {writer.path}?", yes)
            return "overwrite"
    return "error"


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} This is not a terminal: pass --yes")
    if not typer.confirm(question, err=True):
        raise UserError("nothing was done")


def _describe_stage(stage: Status) -> str:
    """A stage with what it computes on, and its figures once it has any."""
    amounts = ", ".join(f"{name} {amount:g}" for name, amount in stage["resources"].items())
    text = f"{stage['name']} on {stage['device']}{f' ({amounts})' if amounts else ''}"
    if not stage["batches"]:
        return f"{text}: no batch yet"
    failed = f", {stage['rows_failed']} failed" if stage["rows_failed"] else ""
    rates = f"; {stage['rows_per_s']:.3g} rows/s, {stage['busy']:.2g} busy" if stage["rows_per_s"] is not None else ""
    return f"{text}: {stage['rows_in']} rows in, {stage['rows_out']} out{failed}, {stage['work_s']:.3g} s{rates}"


def _describe_output(info: Status) -> str:
    return f"{info['path']}: {info['rows']} rows, {format_bytes(info['bytes'])}"


def _color_status(status: str) -> str:
    colour = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "yellow", "CANCELLING": "yellow"}.get(status)
    return f"[{colour}]{status}[/]" if colour else status


def _format_time(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
