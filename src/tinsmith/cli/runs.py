"""`tinsmith runs`: list, show and compare training runs, follow a run's metrics, and log metrics to a run.

The commands use the dashboard's routes. A run has the metrics of its passes and optimizer steps, which the server
records, and those that the client logs (`POST /api/v1/log_metrics`). Exit status: 0 for success, 1 if `log` left
a part of its file out, 2 if the command was refused, 130 if the user stopped following.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from tinsmith.cli.remote import (
    INTERRUPTED,
    AsJson,
    exit_on_errors,
    format_duration,
    format_time,
    notes,
    output,
    plain_table,
    print_json,
    print_result,
    print_rows,
    print_table,
    server,
)
from tinsmith.errors import TinsmithError, UserError
from tinsmith.exchange.console_urls import run_url
from tinsmith.settings.environment import client_address

if TYPE_CHECKING:
    from tinsmith.exchange.metrics import RunMetrics
    from tinsmith.exchange.transfer import TinkerServer

BARS = "".join(chr(0x2581 + eighth) for eighth in range(8))
"""Block characters from one to eight eighths of a line's height."""
MAX_BARS = 24
POLL_S = 1.0
INCOMPLETE = 1
"""Exit status if a part of the file was not logged."""
SEND_TRIES = 10
MAX_MATCHES = 50
MAX_LISTED = 3
MAX_UNSENT = 2048
"""The most points that wait for the server while the file is read."""

app = typer.Typer(help="List, show, compare and follow training runs.", no_args_is_help=True)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, the beginning of one, or its name.")]
Run = dict[str, Any]
Series = Mapping[str, Sequence[tuple[int, float]]]
"""Steps and values by metric name."""


@app.command("list")
def list_runs(
    search: Annotated[str, typer.Option(help="Words that a run's id, name, model or state contains.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List training runs, newest first."""
    with exit_on_errors(), server() as client:
        runs = client.get("dashboard/runs", {"limit": limit, **({"search": search} if search else {})})["runs"]

    def row(run: Run) -> tuple[object, ...]:
        rank, last = run["lora_rank"] or "full", format_time(run["last_request_at"])
        duration = format_duration(run["duration_s"])
        return run["model_id"], _name(run), run["base_model"], rank, run["status"], run["step"], duration, last

    names = ("run", "name", "base model", "rank", "status", "step", "duration", "last request")
    print_rows(as_json, runs, names, row)


@app.command()
def show(run_id: RunId, as_json: AsJson = False) -> None:
    """Show a run, and its metrics from the first step to the last."""
    with exit_on_errors(), server() as client:
        run = _find_run(client, run_id)
        series = _series(_points(client, run["model_id"], 0.0)[0])
        loads = _loads_into(client, run["model_id"])
    if as_json:
        print_json({**run, "loads": loads, "series": series})
        return
    properties = Table.grid(padding=(0, 2))
    for name, value in _describe_run(run).items():
        properties.add_row(name, escape(value))
    for load in loads:
        properties.add_row("loaded", escape(f"{load['path']} ({format_time(load['time'])})"))
    output.print(properties)
    table = plain_table("metric", "first", "last", "least", "most", "")
    for name, points in sorted(series.items()):
        values = [value for _, value in points]
        ends = (values[0], values[-1], min(values), max(values))
        table.add_row(escape(name), *map(_number, ends), _bars(values))
    print_table(table)


@app.command()
def compare(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two runs or more.")], as_json: AsJson = False
) -> None:
    """Compare runs: the properties that differ, and the last value of each metric."""
    with exit_on_errors(), server() as client:
        if len(run_ids) < 2:
            raise UserError(f"compare got {len(run_ids)} run; name at least two")
        runs = [_find_run(client, run_id) for run_id in run_ids]
        run_ids = [run["model_id"] for run in runs]
        series = [_series(_points(client, run_id, 0.0)[0]) for run_id in run_ids]
    run_properties = [_describe_run(run) for run in runs]
    property_names = {name: 0 for properties in run_properties for name in properties}
    rows = [(name, [properties.get(name, "") for properties in run_properties]) for name in property_names]
    different = {name: values for name, values in rows if len(set(values)) > 1 and name not in ("run", "page")}
    names = sorted({name for run_series in series for name in run_series})
    last = {name: [run_series[name][-1][1] if name in run_series else None for run_series in series] for name in names}
    if as_json:
        print_json({"runs": run_ids, "differences": different, "metrics": last})
        return
    table = plain_table("", *run_ids)
    for name, texts in different.items():
        table.add_row(name, *map(escape, texts))
    table.add_section()
    for name, values in last.items():
        table.add_row(escape(name), *("" if value is None else _number(value) for value in values))
    print_table(table)


@app.command()
def tail(
    run_id: RunId,
    steps: Annotated[int, typer.Option("--steps", "-n", min=0, help="Earlier points to print first.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each point as a line of JSON.")] = False,
) -> None:
    """Print a run's newest metrics, one line per step."""
    with exit_on_errors(), server() as client:
        try:
            run_id = _find_run(client, run_id)["model_id"]
            points, cursor = _points(client, run_id, 0.0)
            _print_points(points[len(points) - steps :] if steps < len(points) else points, as_json=as_json)
            printed = {_key(point) for point in points}
            while follow:
                time.sleep(POLL_S)
                points, cursor = _points(client, run_id, cursor)
                _print_points([point for point in points if _key(point) not in printed], as_json=as_json)
                printed |= {_key(point) for point in points}
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


@app.command("log")
def log_file(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run's id from `tinsmith runs list`.")],
    file: Annotated[Path, typer.Argument(help="JSON lines with a `step`, such as the cookbook's metrics.jsonl.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Log the numbers of a file of metrics to a run. Logging a line again changes nothing."""
    from tinsmith.exchange.metrics import RunMetrics

    with exit_on_errors(), RunMetrics(run_id) as run:
        source = _MetricsFile(run, str(file))
        _log_lines(source, file, follow=follow)
    result = {"run": run_id, "points": source.num_points, "left_out": source.num_left_out}
    suffix = f"; {source.num_left_out} of its lines were not logged in full" if source.num_left_out else ""
    print_result(as_json, result, f"logged {source.num_points} points of {file} to {run_id}{suffix}")
    if source.num_left_out:
        raise typer.Exit(INCOMPLETE)


def _log_lines(source: _MetricsFile, file: Path, *, follow: bool) -> None:
    try:
        with file.open("rb") as lines:
            source.log_lines(lines, is_growing=follow)
            while follow:
                time.sleep(POLL_S)
                source.log_lines(lines, is_growing=True)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    source.send_rest()


class _MetricsFile:
    """Logs the lines of a file, and prints each line, or number of a line, that is not logged, with the reason."""

    def __init__(self, run: RunMetrics, name: str) -> None:
        self.num_points = 0
        self.num_left_out = 0
        """Lines of which at least one number is not logged."""
        self._run = run
        self._name = name
        self._line = 0
        self._partial = b""

    def log_lines(self, lines: IO[bytes], *, is_growing: bool) -> None:
        """Log the lines up to the present end. With `is_growing`, an incomplete last line is left for later."""
        while chunk := lines.readline():
            self._partial += chunk
            if chunk.endswith(b"\n"):
                self._log_line()
        if not is_growing:
            self._log_line()
        self._run.flush()

    def send_rest(self) -> None:
        """Raises TinsmithError if the server does not take the points."""
        for _ in range(SEND_TRIES):
            self._run.flush()
            if not self._run.num_waiting:
                return
            time.sleep(POLL_S)
        raise TinsmithError(f"the server did not take {self._run.num_waiting} points of {self._name}; run it again")

    def _log_line(self) -> None:
        line, self._partial = self._partial, b""
        self._line += 1
        if not line.strip():
            return
        try:
            reasons = self._log_values(json.loads(line))
            self.num_points += 1
        except UserError as error:
            reasons = {"": str(error)}
        except ValueError as error:
            reasons = {"": f"it is not JSON: {error}"}
        self.num_left_out += bool(reasons)
        for name, reason in reasons.items():
            text = f"{name!r} {reason}" if name else reason
            notes.print(f"[yellow]not logged:[/] {escape(f'{self._name}, line {self._line}: {text}')}")

    def _log_values(self, values: object) -> dict[str, str]:
        """Returns why numbers of the line are not logged. Raises UserError for a line that has no step or no number."""
        from tinsmith.exchange.metrics import select_numbers, step_of

        if not isinstance(values, dict):
            raise UserError(f"it is a {type(values).__name__}; it must be an object with a step")
        if "step" not in values:
            raise UserError("it has no step")
        step = step_of(values.pop("step"))
        metrics, reasons = select_numbers(values)
        if not metrics and not reasons:
            raise UserError("it has no numbers")
        if self._run.num_waiting >= MAX_UNSENT:
            self.send_rest()
        self._run.log_metrics(metrics, step)
        return reasons


def _find_run(client: TinkerServer, text: str) -> Run:
    """The run with this id, or else this name, or else an id that begins with it. Raises UserError."""
    runs: list[Run] = client.get("dashboard/runs", {"search": text, "limit": MAX_MATCHES})["runs"]
    for matches in (
        [run for run in runs if run["model_id"] == text],
        [run for run in runs if run["name"] == text],
        [run for run in runs if run["model_id"].startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(run["model_id"] for run in matches[:MAX_LISTED]) + ", ..." * (len(matches) > MAX_LISTED)
            raise UserError(f"run {text!r} is one of {len(matches)}: {ids}; give more of its id")
    raise UserError(f"run {text!r} is unknown; `tinsmith runs list` shows ids and names")


def _loads_into(client: TinkerServer, run_id: str) -> list[dict[str, str]]:
    """The checkpoints that were loaded into a run, each with the time of its last load, in order of these times."""
    links = client.get(f"dashboard/runs/{quote(run_id, safe='')}/lineage")["links"]
    loads = [{"path": link["path"], "time": link["time"]} for link in links if link["child"] == run_id]
    return sorted(loads, key=lambda load: load["time"])


def _name(run: Run) -> str:
    """A run's name; without one, its base model and when it began."""
    return run["name"] or f"{run['base_model'].rpartition('/')[2]} {format_time(run['created_at'])}"


def _points(client: TinkerServer, run_id: str, after: float) -> tuple[list[dict[str, Any]], float]:
    """Return the points since a cursor, some possibly repeated, and the next cursor."""
    answer = client.get(f"training_runs/{quote(run_id, safe='')}/metrics", {"after": after})
    return answer["points"], answer["cursor"]


def _key(point: Mapping[str, Any]) -> tuple[str, int, float]:
    return point["source"], point["step"], point["time"]


def _print_points(points: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    for point in points:
        if as_json:
            typer.echo(json.dumps(point))
        else:
            metrics = "  ".join(f"{name}={_number(value)}" for name, value in sorted(point["metrics"].items()))
            output.print(
                f"{time.strftime('%H:%M:%S', time.localtime(point['time']))}  step {point['step']}  {escape(metrics)}"
            )


def _series(points: Sequence[Mapping[str, Any]]) -> Series:
    values_by_step: dict[str, dict[int, float]] = {}
    for point in points:
        for name, value in point["metrics"].items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                values_by_step.setdefault(name, {})[point["step"]] = float(value)
    return {name: sorted(values.items()) for name, values in values_by_step.items()}


def _describe_run(run: Run) -> dict[str, str]:
    """Return the properties of a run as text."""
    properties = {
        "run": run["model_id"],
        "page": run_url(client_address()[0], run["model_id"]),
        "name": _name(run),
        "tags": ", ".join(run["tags"]),
        "base model": run["base_model"],
        "rank": str(run["lora_rank"] or "full"),
        "optimizer": run["optimizer_type"],
        "status": run["status"] if not run["status_reason"] else f"{run['status']} ({run['status_reason']})",
        "model": run["state"] if not run["reason"] else f"{run['state']} ({run['reason']})",
        "duration": format_duration(run["duration_s"]),
        "step": str(run["step"]),
        "created": format_time(run["created_at"]),
        "last request": format_time(run["last_request_at"]),
    }
    metadata = sorted((run["user_metadata"] or {}).items())
    return properties | {f"metadata {name}": value for name, value in metadata if name not in ("name", "tags")}


def _number(value: float) -> str:
    return f"{value:.5g}"


def _bars(values: Sequence[float]) -> str:
    """Draw a curve of at most `MAX_BARS` characters, each for the mean of a part of the values."""
    count = min(len(values), MAX_BARS)
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / (high - low) * len(BARS)))] for mean in means)
