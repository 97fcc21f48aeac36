"""The architecture, as a table that fails: who may import whom, what each process may load, how long things get."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tinsmith"
GENERATED = {"tinker_public_pb2"}

COLLECTIONS = {"cli", "exchange", "fleet", "observing", "records"}
"""Packages whose modules have little to do with each other: each has a row of its own."""

# Module (or package) -> which parts of tinsmith it may import. Durable nouns know SQL and no device; backends and
# samplers know a device and neither SQL nor HTTP; they meet in `engine` only.
VALUES = {"errors", "ops"}
DURABLE = {
    "records.audit",
    "cancelling",
    "observing.census",
    "checkpoints",
    "records.curves",
    "custom_losses",
    "fleet.engines",
    "fleet.executors",
    "futures",
    "records.kept_samples",
    "models",
    "observing.overview",
    "records.recent_steps",
    "sampling_sessions",
    "sequences",
    "sessions",
    "observing.traces",
    "records.usage",
}
MAY_IMPORT: dict[str, set[str]] = {
    "cli": set(),
    "cli.__main__": {"cli.main"},
    "exchange": set(),
    "fleet": set(),
    "observing": set(),
    "records": set(),
    "tables": {"tables"},
    "errors": set(),
    "ops": set(),
    "settings": {"errors"},
    "failpoints": {"errors"},
    "background": set(),
    "clocks": set(),
    "observing.meters": set(),
    "observing.tracing": {"errors"},
    "observing.census": {"db", "tables"},
    "fleet.early": {"observing.meters", "settings"},
    "heap": set(),
    "signing": {"errors"},
    "quotas": {"db", "tables", "errors", "futures"},
    "cli.keys": {"db", "errors", "quotas", "settings", "storage", "tenants"},
    "storage": {"failpoints", "errors", "settings", "storage"},
    "exchange.adapters": VALUES,
    "exchange.merging": VALUES | {"exchange.adapters", "storage"},
    "exchange.transfer": {"exchange.adapters", "errors", "storage"},
    "exchange.hub": VALUES | {"exchange.adapters", "checkpoints", "storage"},
    "cli.checkpoints": {"exchange.adapters", "bases", "errors", "exchange.merging", "settings", "exchange.transfer"},
    "notify": {"errors"},
    "listen": {"background", "db", "notify"},
    "observing.logs": set(),
    "batch": VALUES
    | {"", "background", "batch", "chat", "failpoints", "db", "notify", "tables", "settings", "storage", "wire"},
    "cli.batch": {"batch", "errors"},
    "answers": VALUES
    | {
        "admission",
        "bases",
        "batch",
        "checkpoints",
        "fleet.dispatch",
        "futures",
        "notify",
        "quotas",
        "sampling_sessions",
        "sessions",
        "wire",
    },
    "records.curves": VALUES | {"db", "prepared", "tables"},
    "records.recent_steps": {"db", "tables"},
    "records.kept_samples": {"db", "prepared", "tables", "errors"},
    "observing.overview": {"db", "tables", "errors", "observing.census"},
    "dashboard": set(),
    "files": {"db", "tables", "errors", "storage"},
    "openai_batches": {
        "background",
        "batch",
        "failpoints",
        "db",
        "tables",
        "errors",
        "files",
        "openai_batches",
        "settings",
        "storage",
        "wire",
    },
    "db": {"failpoints", "errors", "kept", "notify", "turns"},
    "kept": set(),
    "threads": set(),
    "turns": set(),
    "prepared": set(),
    "migrations": {"tables"},
    "nano": {"nano"},
    "placement": {"db", "errors", "placement", "settings", "tables"},
    "plan": {"errors", "plan"},
    "scheduler": {"ops"},
    "fleet.running_notes": set(),
    "fleet.ownership": {"db", "fleet.engines", "notify", "ops", "prepared", "tables"},
    "fleet.view": {"db", "fleet.ownership", "fleet.loads", "tables"},
    "fleet.loads": set(),
    "fleet.routing": {"ops"},
    "fleet.executors": {"cancelling", "db", "notify", "ops", "fleet.routing", "tables"},
    "fleet.dispatch": {"fleet.executors", "fleet.routing", "fleet.loads", "futures", "ops"},
    "losses": VALUES,
    "loss_graphs": VALUES,
    "bases": VALUES | {"nano"},
    "chat": VALUES | {"bases", "chat", "wire"},
    "partials": {"ops"},
    "standing": {"records.audit", "errors", "sampling_sessions", "sessions"},
    "tenants": {"records.audit", "db", "tables", "errors", "signing", "tenants"},
    "wire": VALUES | {"wire"},
    "admission": VALUES | {"losses", "checkpoints"},
    "custom_losses": VALUES | {"db", "tables"},
    "sequences": VALUES | {"db", "tables"},
    "cancelling": {"db", "tables", "errors"},
    "forgetting": {"db", "prepared", "tables"},
    "futures": VALUES
    | {"cancelling", "failpoints", "db", "forgetting", "tables", "notify", "prepared", "observing.tracing"},
    "sessions": VALUES | {"clocks", "db", "prepared", "tables"},
    "records.audit": {"db", "tables"},
    "records.usage": {"db", "tables", "forgetting"},
    "observing.traces": {"db", "tables"},
    "models": VALUES | {"db", "tables", "prepared"},
    "sampling_sessions": VALUES | {"db", "prepared", "tables"},
    "fleet.engines": {"background", "db", "fleet.executors", "notify", "prepared", "tables"},
    "checkpoints": VALUES | {"db", "tables", "models", "storage"},
    "samplers": VALUES | {"samplers", "backends", "plan"},
    "backends": VALUES | {"heap", "losses", "loss_graphs", "samplers", "backends", "plan"},
    "encryption": {"errors"},
    "engine": VALUES
    | DURABLE
    | {
        "background",
        "backends",
        "fleet.ownership",
        "fleet.running_notes",
        "losses",
        "bases",
        "failpoints",
        "db",
        "fleet.early",
        "tables",
        "encryption",
        "engine",
        "listen",
        "observing.logs",
        "observing.meters",
        "notify",
        "partials",
        "plan",
        "prepared",
        "samplers",
        "scheduler",
        "settings",
        "storage",
        "observing.tracing",
        "wire",
    },
    "janitor": DURABLE | {"clocks", "db", "heap", "files", "settings", "storage"},
    "fleet.supervisor": {
        "background",
        "bases",
        "fleet.early",
        "fleet.engines",
        "observing.meters",
        "ops",
        "fleet.running_notes",
        "settings",
        "signing",
    },
    "routes": VALUES
    | DURABLE
    | {
        "exchange.adapters",
        "exchange.hub",
        "answers",
        "admission",
        "bases",
        "batch",
        "chat",
        "failpoints",
        "dashboard",
        "db",
        "fleet.dispatch",
        "encryption",
        "files",
        "openai_batches",
        "losses",
        "loss_graphs",
        "observing.meters",
        "nano",
        "notify",
        "partials",
        "quotas",
        "routes",
        "settings",
        "signing",
        "standing",
        "storage",
        "tenants",
        "threads",
        "observing.tracing",
        "wire",
    },
    "app": {"batch", "routes", "wire"},
    "connections": set(),
    "server": DURABLE
    | {
        "answers",
        "app",
        "background",
        "connections",
        "bases",
        "batch",
        "chat",
        "failpoints",
        "db",
        "fleet.dispatch",
        "fleet.early",
        "tables",
        "errors",
        "files",
        "fleet.view",
        "openai_batches",
        "janitor",
        "listen",
        "observing.meters",
        "notify",
        "partials",
        "quotas",
        "settings",
        "signing",
        "standing",
        "storage",
        "fleet.supervisor",
        "tenants",
        "threads",
        "observing.tracing",
    },
    "cli.doctor": {"bases", "errors", "settings"},
    "cli.plan": {"bases", "errors", "plan"},
    "cli.demo": {"errors", "nano"},
    "cli.bench": {"errors"},
    "cli.placed": {"cli.main", "errors", "settings", "signing"},
    "cli.up": {"errors", "nano", "placement", "settings", "signing"},
    "cli.main": {
        "fleet.early",
        "heap",
        "",
        "cli.batch",
        "cli.bench",
        "cli.checkpoints",
        "cli.demo",
        "cli.doctor",
        "cli.plan",
        "errors",
        "cli.keys",
        "cli.up",
        "observing.logs",
        "plan",
        "server",
        "settings",
    },
}

# Process entry -> libraries that importing it must not load.
MUST_NOT_LOAD = {
    "tinsmith.server.process": (
        "torch",
        "transformers",
        "ray",
        "vllm",
        "tinker",
        "peft",
        "obstore",
        "pyarrow",
        "tinsmith.batch.worker.child",
    ),
    "tinsmith.batch.worker.worker": ("sqlalchemy", "starlette", "httpx", "numpy", "obstore", "pyarrow", "torch"),
    "tinsmith.engine.__main__": ("starlette", "uvicorn", "fastapi", "tinker", "peft", "torch", "alembic"),
    "tinsmith.cli.main": ("torch", "transformers", "starlette", "sqlalchemy", "tinker", "ray"),
    "tinsmith.backends.torch": ("sqlalchemy", "starlette", "uvicorn", "tinker", "peft"),
}

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60
# Functions that are longer, with the reason. Only ever shrink this.
LONG_FUNCTIONS: set[str] = set()


def source_files() -> list[Path]:
    """Everything that people wrote; a migration is history and stays as it was generated."""
    return [
        path for path in sorted(SOURCE.rglob("*.py")) if path.stem not in GENERATED and path.parent.name != "versions"
    ]


def part_of(path: Path) -> str:
    return part_named(".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip("."))


def part_named(module: str) -> str:
    """The part that a module (without `tinsmith.`) belongs to: itself in a package of unlike modules, else its top."""
    top, _, rest = module.partition(".")
    return f"{top}.{rest.split('.')[0]}" if top in COLLECTIONS and rest else top


def imports(path: Path) -> Iterator[str]:
    """The parts of tinsmith that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            whole = module == "tinsmith" or module.removeprefix("tinsmith.") in COLLECTIONS
            names = [f"{module}.{alias.name}" for alias in node.names] if whole else [module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "tinsmith":
                part = part_named(rest)
                file = SOURCE / part.replace(".", "/")
                yield part if file.is_dir() or file.with_suffix(".py").is_file() else part.rpartition(".")[0]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_the_table_allows(path: Path) -> None:
    part = part_of(path)
    if part == "":
        return
    assert part in MAY_IMPORT, f"{part} has no row in MAY_IMPORT"
    forbidden = set(imports(path)) - MAY_IMPORT[part] - {part}
    assert not forbidden, f"{path.relative_to(SOURCE)} imports {sorted(forbidden)}"


def test_the_table_names_only_parts_that_exist() -> None:
    assert set(MAY_IMPORT) == {part_of(path) for path in source_files()} - {""}


@pytest.mark.parametrize("entry", MUST_NOT_LOAD)
def test_a_process_does_not_load_what_it_must_not(entry: str) -> None:
    script = f"import {entry}, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert not set(MUST_NOT_LOAD[entry]) & set(loaded)


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert text.isascii(), "not ASCII"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_FUNCTIONS:
            assert (node.end_lineno or 0) - node.lineno <= MAX_FUNCTION_LINES, f"{node.name} is too long"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_whoever_is_cancelled_hears_of_it(path: Path) -> None:
    # Until Python 3.12, wait_for drops a cancellation that comes in the moment in which what it waits for is there.
    assert "asyncio.wait_for(" not in path.read_text(), "use `async with asyncio.timeout(...)`"
