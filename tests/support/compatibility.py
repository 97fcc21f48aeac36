"""The methods, commands and endpoints of unmodified clients, and the tests that cover them: the source of
docs/compatibility.md. Tests declare their coverage with `@pytest.mark.covers("TrainingClient.forward", "POST
/forward_backward")`; the declarations are read from the source, so that the table needs no test run. `Witness` records
the calls of a marked test and reports declared names without a call. Methods and commands are found by introspection of
the installed SDK, endpoints are the list below. Names that no test covers are in EXCEPTIONS, with the reason.
"""

from __future__ import annotations

import ast
import csv
import functools
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import pytest
import tinker
from tinker.cli.__main__ import main_cli

from recipes.table import ROWS, Row

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "compatibility.md"
CLIENT_RESULTS = TESTS / "clients" / "results.json"
"""Results of scripts/test-clients, by suite."""
SDK_RESULTS = TESTS / "clients" / "sdk_results.json"
"""Results of scripts/test-sdks, by minor version."""
LEDGER = DOCUMENT.with_name("ledger.csv")
"""Tinsmith's features with their tests and what these run against; edited by hand."""
LEDGER_ROWS = {"S": 17, "T": 15, "O": 8, "K": 16, "X": 18, "A": 8, "C": 13, "D": 6, "F": 9, "I": 9}
"""The number of rows of each letter; B46 and Z stand alone."""
AGAINST = {
    "real": "against what users run",
    "contract": "against a documented interface",
    "fake": "on the fake backend",
}
MISSING = "missing"

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)

# Below /api/v1; `{ckpt}` is a checkpoint of a training run, `{kind}/{name}`.
ENDPOINTS = (
    "POST /client/config",
    "POST /client/dynamic_config",
    "POST /auth/token",
    "GET /auth/apikey/me",
    "DELETE /auth/apikey/me",
    "GET /healthz",
    "GET /get_server_capabilities",
    "POST /create_session",
    "POST /session_heartbeat",
    "POST /sessions/{session_id}/finish",
    "PUT /sessions/{session_id}/project",
    "GET /sessions",
    "GET /sessions/{session_id}",
    "GET /sessions/{session_id}/trace_export",
    "POST /sessions/search",
    "POST /create_model",
    "POST /get_info",
    "POST /forward_backward",
    "POST /optim_step",
    "POST /save_weights",
    "POST /save_weights_for_sampler",
    "POST /save_weights_external",
    "POST /load_weights",
    "POST /create_sampling_session",
    "POST /join_sampling_session",
    "GET /samplers/{sampling_session_id}",
    "POST /asample",
    "POST /retrieve_future",
    "POST /retrieve_futures",
    "POST /cancel_future",
    "POST /create_custom_loss",
    "POST /copy_weights",
    "POST /weights_info",
    "GET /training_runs",
    "GET /training_runs/{run_id}",
    "GET /training_runs/{run_id}/checkpoints",
    "GET /checkpoints",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}",
    "POST /training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "DELETE /training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
    "PUT /training_runs/{run_id}/checkpoints/{kind}/{name}/ttl",
    "GET /training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls",
    "GET /audit",
    "GET /billing/usage/events",
    "GET /billing/usage/checkpoints/current",
    "POST /telemetry",
)

# Name -> why no test covers it through the SDK or its command line. Do not add entries.
EXCEPTIONS: dict[str, str] = {
    "GET /healthz": "no method asks for it, but every test against a live server does",
    "SamplingClient.on_queue_state_change": "the SDK calls it to log why a result is late",
    "ServiceClient.get_console_url": "an address of the hosted service's console",
    "TrainingClient.get_console_url": "an address of the hosted service's console",
}


@dataclass(frozen=True, slots=True)
class ClientResult:
    """`failed` names checks; `reason` says why a suite could not be installed or run."""

    package: str
    version: str
    date: str
    passed: int
    failed: list[str]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """`against` is of AGAINST, or MISSING; `lacks` names missing or unproven parts. Tests are `file::test`."""

    row: str
    promise: str
    against: str
    lacks: str
    tests: tuple[str, ...]


def ledger() -> list[LedgerRow]:
    with LEDGER.open(newline="") as file:
        return [
            LedgerRow(
                columns["row"],
                columns["what"],
                columns["against"],
                columns["lacks"],
                tuple(columns["tests"].split("; ") if columns["tests"] else ()),
            )
            for columns in csv.DictReader(file)
        ]


def sdk_methods() -> list[str]:
    """Every public method of every public client class."""
    return [
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name, member in inspect.getmembers(client)
        if callable(member) and not name.startswith("_")
    ]


def cli_commands() -> list[str]:
    """Every command of `tinker`, in full."""
    return [f"tinker {name}" for name in _commands(main_cli, "")]


def _commands(group: click.Group, prefix: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}"


def coverable_names() -> set[str]:
    return {*sdk_methods(), *cli_commands(), *ENDPOINTS}


def collect_coverage() -> dict[str, list[str]]:
    """Name -> the tests that declare its coverage, as `file::test`."""
    tests_by_name: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in _parse_covers(node):
                    tests_by_name[name].append(f"{path.relative_to(TESTS)}::{node.name}")
    return dict(tests_by_name)


def _parse_covers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


def render() -> str:
    """The text of docs/compatibility.md."""
    tests = collect_coverage()
    clients = [client.__name__ for client in CLIENTS]
    methods = {name: [method for method in sdk_methods() if method.startswith(f"{name}.")] for name in clients}
    return "\n".join(
        [
            "# Compatibility",
            "",
            "Made by `scripts/write-compatibility`. Each line names the tests below `tests/` that drive a method,",
            f"command or endpoint with the unmodified `tinker=={tinker.__version__}`. `(_async)` is the same method",
            "with that ending.",
            "",
            "## Ledger",
            "",
            *_ledger_lines(),
            "",
            "## Methods of the SDK",
            *(line for name in clients for line in ("", f"### {name}", "", *_section(methods[name], tests))),
            "",
            "## Commands of `tinker`",
            "",
            *_section(cli_commands(), tests),
            "",
            "## Endpoints",
            "",
            *_endpoint_lines(tests),
            "",
            "## Versions of the SDK",
            "",
            *_sdk_lines(),
            "",
            "## Clients of others",
            "",
            *_client_lines(),
            "",
            "## Recipes",
            "",
            "These recipes of `tinker-cookbook` run unmodified, with generated data, and pass the checks of",
            "`tests/recipes/table.py`. `make test-recipes` runs all, `make test` those without a star.",
            "",
            *_recipe_lines(ROWS),
            "",
        ]
    )


def _endpoint_lines(tests: dict[str, list[str]]) -> Iterator[str]:
    driven = sum(name in tests for name in ENDPOINTS)
    yield f"Tests drive {driven} of the {len(ENDPOINTS)} endpoints that the SDK uses (`ENDPOINTS` in"
    yield "`tests/support/compatibility.py`)."
    yield ""
    yield from (f"- `{name}`: *not driven*, {EXCEPTIONS[name]}" for name in ENDPOINTS if name in EXCEPTIONS)


def _ledger_lines() -> Iterator[str]:
    rows = ledger()
    counts = {kind: sum(row.against == kind for row in rows) for kind in AGAINST}
    proven = ", ".join(f"{counts[kind]} {words}" for kind, words in AGAINST.items())
    partly = sum(bool(row.lacks) and row.against != MISSING for row in rows)
    missing = ", ".join(row.row for row in rows if row.against == MISSING) or "nothing"
    yield f"[ledger.csv](ledger.csv) lists {len(rows)} promises with their tests: {proven}."
    yield f"Its column `lacks` says what {partly} of them lack. Missing: {missing}."


FORMS = (
    ("0.7", "0.16", "JSON", "JSON"),
    ("0.18", "0.18", "JSON", "samples protobuf, passes JSON"),
    ("0.19", "0.24", "JSON", "protobuf"),
    ("0.25", "0.38", "protobuf", "protobuf"),
)
"""First and last minor version, the form of the passes that it sends, and that of the results that it reads."""


def _sdk_lines() -> Iterator[str]:
    """A table of forms, and what failed with which version."""
    results = {minor: ClientResult(**values) for minor, values in json.loads(SDK_RESULTS.read_text()).items()}
    yield "`make test-sdks` trains, samples, scores, saves and resumes with one release of each minor version, against"
    yield "one server; all numbers must equal those of the pinned SDK. A result has the type that the client's `Accept`"
    yield f"header prefers. The last results are of {max(result.date for result in results.values())}."
    yield ""
    yield "| SDK | sends passes as | reads results as | releases that pass |"
    yield "|---|---|---|---|"
    for first, last, passes_form, results_form in FORMS:
        members = [result for minor, result in results.items() if _number(first) <= _number(minor) <= _number(last)]
        versions = ", ".join(result.version for result in members if not (result.failed or result.reason))
        releases = first if first == last else f"{first} to {last}"
        yield f"| {releases} | {passes_form} | {results_form} | {versions or 'none'} |"
    failures = [f"- {minor}: {result.reason or ', '.join(result.failed)}" for minor, result in results.items()
                if result.failed or result.reason]  # fmt: skip
    yield from ("", "Failed:", "", *failures) if failures else ()
    yield ""
    yield "There are no releases 0.17 and 0.37. SDK 0.7 needs torch on the client. If an old SDK refuses a request by"
    yield "itself, such as a loss that it does not know, it skips that request's number, and later requests of the"
    yield "model wait for it: create the model again."


def _number(minor: str) -> int:
    return int(minor.partition(".")[2])


def _client_lines() -> Iterator[str]:
    """A line for each suite, from the results in the repository."""
    results = {name: ClientResult(**fields) for name, fields in json.loads(CLIENT_RESULTS.read_text()).items()}
    dates = sorted({result.date for result in results.values()})
    yield "`make test-clients` runs these suites against a live server, with the newest packages. The last results are"
    yield f"of {', '.join(dates)}:"
    yield ""
    for name, result in results.items():
        failed = result.reason or ", ".join(f"`{test}`" for test in result.failed)
        outcome = f"{result.passed} passed" + (f", failed: {failed}" if failed else "")
        suite = "" if name == result.package else f"{name}, "
        date = f", {result.date}" if len(dates) > 1 else ""
        yield f"- {suite}{result.package} {result.version}{date}: {outcome}"


def _section(names: list[str], tests: dict[str, list[str]]) -> Iterator[str]:
    """One line for each group of names with the same tests."""
    lines: dict[str, list[str]] = {}
    for name in names:
        proof = f"*not driven*, {EXCEPTIONS[name]}" if name in EXCEPTIONS else ""
        proof = proof or ", ".join(f"`{test}`" for test in tests.get(name, []))
        lines.setdefault(proof, []).append(name.rpartition(".")[2] if "." in name else name)
    for proof, driven in lines.items():
        with_async = {name for name in driven if f"{name}_async" in driven}
        shortened = [name for name in driven if name.removesuffix("_async") not in with_async or name in with_async]
        quoted = [f"`{name}`{' (_async)' if name in with_async else ''}" for name in shortened]
        yield f"- {', '.join(quoted)}: {proof}"


def _recipe_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One line for each module: its rows by name, and what they exercise."""
    modules: dict[str, list[str]] = {}
    for row in rows:
        modules.setdefault(row.module, []).append(f"{row.exercises} ({row.name}{'' if row.quick else '*'})")
    for module, exercises in modules.items():
        yield f"- `{module}`: {'; '.join(exercises)}"


class Witness:
    """Records the SDK's public methods that a test calls, and the requests that it sends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.called_names: set[str] = set()
        for name in sdk_methods():
            client = getattr(tinker, name.split(".")[0])
            member = inspect.getattr_static(client, name.split(".")[1])
            function = member.__func__ if isinstance(member, staticmethod) else member
            recorder = self._record_calls(name, function)
            patch.setattr(client, name.split(".")[1], staticmethod(recorder) if function is not member else recorder)
        for transport in (httpx.Client, httpx.AsyncClient):
            patch.setattr(transport, "send", self._record_requests(transport.send))

    def missing(self, names: set[str]) -> set[str]:
        """Those of `names` that were not called. If they include a command, which may run as a process, none are
        checked."""
        return set() if any(name.startswith("tinker ") for name in names) else names - self.called_names

    def _record_calls(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            self.called_names.add(name)
            return function(*args, **kwargs)

        return call

    def _record_requests(self, send: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(send)
        def note(client: object, request: httpx.Request, **kwargs: object) -> object:
            _, below, path = request.url.path.partition("/api/v1")
            if below:
                self.called_names.update(
                    name for name in ENDPOINTS if _pattern(name).fullmatch(f"{request.method} {path}")
                )
            return send(client, request, **kwargs)

        return note


@functools.cache
def _pattern(endpoint: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]+", endpoint))
