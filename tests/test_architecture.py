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

# Module (or package) -> which parts of tinsmith it may import. Durable nouns know SQL and no device; backends and
# samplers know a device and neither SQL nor HTTP; they meet in `engine` only.
VALUES = {"errors", "ops"}
DURABLE = {
    "audit",
    "census",
    "checkpoints",
    "curves",
    "custom_losses",
    "engines",
    "futures",
    "kept_samples",
    "models",
    "overview",
    "recent_steps",
    "sampling_sessions",
    "sequences",
    "sessions",
    "traces",
    "usage",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "ops": set(),
    "settings": {"errors"},
    "crashpoints": {"errors"},
    "clocks": set(),
    "meters": set(),
    "tracing": {"errors"},
    "census": {"db"},
    "heap": set(),
    "signing": {"errors"},
    "quotas": {"db", "errors", "futures"},
    "keys_cli": {"db", "errors", "quotas", "settings", "storage", "tenants"},
    "storage": {"crashpoints", "errors", "settings", "storage"},
    "adapters": VALUES,
    "merging": VALUES | {"adapters", "storage"},
    "transfer": {"adapters", "errors", "storage"},
    "hub": VALUES | {"adapters", "checkpoints", "storage"},
    "checkpoints_cli": {"adapters", "bases", "errors", "merging", "settings", "transfer"},
    "notify": {"errors"},
    "listen": {"db", "notify"},
    "logs": set(),
    "batch": VALUES | {"batch", "chat", "crashpoints", "db", "settings", "storage", "wire"},
    "batch_cli": {"batch", "errors"},
    "answers": VALUES
    | {
        "admission",
        "bases",
        "batch",
        "checkpoints",
        "futures",
        "notify",
        "quotas",
        "sampling_sessions",
        "sessions",
        "wire",
    },
    "batch_tables": set(),
    "file_tables": set(),
    "record_tables": set(),
    "curves": VALUES | {"db"},
    "recent_steps": {"db"},
    "kept_samples": {"db", "errors"},
    "overview": {"db", "errors"},
    "dashboard": set(),
    "files": {"db", "errors", "storage"},
    "openai_batches": {
        "batch",
        "crashpoints",
        "db",
        "errors",
        "files",
        "openai_batches",
        "settings",
        "storage",
        "wire",
    },
    "db": {"batch_tables", "crashpoints", "errors", "file_tables", "notify", "record_tables", "turns"},
    "turns": set(),
    "migrations": {"db"},
    "nano": {"nano"},
    "scheduler": {"ops"},
    "losses": VALUES,
    "loss_graphs": VALUES,
    "bases": VALUES | {"nano"},
    "chat": VALUES | {"bases", "chat", "wire"},
    "partials": {"ops"},
    "standing": {"audit", "errors", "sampling_sessions", "sessions"},
    "tenants": {"audit", "db", "errors", "signing", "tenants"},
    "wire": VALUES | {"wire"},
    "admission": VALUES | {"losses", "wire", "checkpoints"},
    "custom_losses": VALUES | {"db"},
    "sequences": VALUES | {"db"},
    "futures": VALUES | {"crashpoints", "db", "notify", "tracing"},
    "sessions": VALUES | {"clocks", "db"},
    "audit": {"db"},
    "usage": {"db", "futures"},
    "traces": {"db"},
    "models": VALUES | {"db"},
    "sampling_sessions": VALUES | {"db"},
    "engines": {"db"},
    "checkpoints": VALUES | {"db", "models", "storage"},
    "samplers": VALUES | {"samplers", "backends"},
    "backends": VALUES | {"losses", "loss_graphs", "samplers", "backends"},
    "encryption": {"errors"},
    "engine": VALUES
    | DURABLE
    | {
        "backends",
        "losses",
        "bases",
        "crashpoints",
        "db",
        "encryption",
        "engine",
        "listen",
        "logs",
        "meters",
        "notify",
        "partials",
        "samplers",
        "scheduler",
        "settings",
        "storage",
        "tracing",
        "wire",
    },
    "janitor": DURABLE | {"clocks", "db", "heap", "files", "settings", "storage"},
    "supervisor": {"bases", "engines", "meters", "ops", "settings"},
    "routes": VALUES
    | DURABLE
    | {
        "adapters",
        "hub",
        "answers",
        "admission",
        "bases",
        "batch",
        "chat",
        "crashpoints",
        "dashboard",
        "encryption",
        "files",
        "openai_batches",
        "losses",
        "loss_graphs",
        "meters",
        "nano",
        "notify",
        "partials",
        "quotas",
        "routes",
        "settings",
        "signing",
        "standing",
        "tenants",
        "tracing",
        "wire",
    },
    "app": {"batch", "routes", "wire"},
    "connections": set(),
    "server": DURABLE
    | {
        "answers",
        "app",
        "connections",
        "bases",
        "batch",
        "chat",
        "crashpoints",
        "db",
        "errors",
        "files",
        "openai_batches",
        "janitor",
        "listen",
        "meters",
        "notify",
        "partials",
        "quotas",
        "settings",
        "signing",
        "standing",
        "storage",
        "supervisor",
        "tenants",
        "tracing",
    },
    "doctor": {"bases", "errors", "settings"},
    "demo": {"errors", "nano"},
    "bench": {"errors"},
    "cli": {
        "",
        "batch_cli",
        "bench",
        "checkpoints_cli",
        "demo",
        "doctor",
        "errors",
        "keys_cli",
        "logs",
        "server",
        "settings",
    },
}

# Process entry -> libraries that importing it must not load.
MUST_NOT_LOAD = {
    "tinsmith.server": (
        "torch",
        "transformers",
        "ray",
        "vllm",
        "tinker",
        "peft",
        "obstore",
        "pyarrow",
        "tinsmith.batch.child",
    ),
    "tinsmith.batch.worker": ("sqlalchemy", "starlette", "httpx", "numpy", "obstore", "pyarrow", "torch"),
    "tinsmith.engine.__main__": ("starlette", "uvicorn", "fastapi", "tinker", "peft", "torch"),
    "tinsmith.cli": ("torch", "transformers", "starlette", "sqlalchemy", "tinker"),
    "tinsmith.backends.torch": ("sqlalchemy", "starlette", "uvicorn", "tinker", "peft"),
}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Functions that are longer, with the reason. Only ever shrink this.
LONG_FUNCTIONS: set[str] = set()


def source_files() -> list[Path]:
    """Everything that people wrote; a migration is history and stays as it was generated."""
    return [
        path for path in sorted(SOURCE.rglob("*.py")) if path.stem not in GENERATED and path.parent.name != "versions"
    ]


def part_of(path: Path) -> str:
    top = path.relative_to(SOURCE).parts[0]
    return top.removesuffix(".py") if top != "__init__.py" else ""


def imports(path: Path) -> Iterator[str]:
    """The parts of tinsmith that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "tinsmith" else [module]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "tinsmith":
                part = rest.split(".")[0]
                yield part if (SOURCE / part).is_dir() or (SOURCE / f"{part}.py").is_file() else ""


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
