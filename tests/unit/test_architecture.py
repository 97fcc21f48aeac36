"""The architecture as tests: allowed imports of packages, libraries of processes, and bounds of sizes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinsmith"
GENERATED = {"tinker_public_pb2"}

# Entry of the first level -> entries that it may import. `types` and `wire` are the lowest layer. Stores use SQL and no
# device; backends and samplers, which are one layer, use a device and neither SQL nor HTTP; `engine` joins them.
VALUES = {"errors", "types"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "settings": {"errors", "runtime"},
    "runtime": {"errors"},
    "losses": VALUES,
    "base_models": VALUES,
    "plan": VALUES | {"runtime"},
    "wire": VALUES,
    "chat": VALUES | {"base_models", "wire"},
    "db": {"errors", "runtime"},
    "telemetry": {"db", "errors"},
    "storage": {"errors", "runtime", "settings"},
    "store": VALUES | {"db", "runtime", "storage", "telemetry"},
    "auth": {"db", "errors", "store"},
    "exchange": VALUES | {"runtime", "settings", "storage", "store", "wire"},
    "cluster": VALUES | {"auth", "base_models", "db", "losses", "runtime", "settings", "store", "telemetry", "wire"},
    "batch": VALUES
    | {"auth", "base_models", "chat", "cluster", "db", "runtime", "settings", "storage", "store", "wire"},
    "backends": VALUES | {"losses", "plan", "runtime", "samplers", "wire"},
    "samplers": VALUES | {"backends", "plan", "runtime", "wire"},
    "engine": VALUES
    | {"backends", "base_models", "cluster", "db", "losses", "plan", "runtime", "samplers", "settings", "storage"}
    | {"store", "telemetry", "wire"},
    "api": VALUES
    | {"auth", "base_models", "batch", "chat", "cluster", "db", "exchange", "losses", "plan", "runtime", "settings"}
    | {"storage", "store", "telemetry", "wire"},
    "server": VALUES
    | {"api", "auth", "base_models", "batch", "chat", "cluster", "db", "losses", "runtime", "settings", "storage"}
    | {"store", "telemetry", "wire"},
    "cli": {"auth", "base_models", "batch", "cluster", "db", "errors", "exchange", "losses", "plan", "runtime"}
    | {"server", "settings", "storage", "telemetry", "wire"},
}
ONE_LAYER = {frozenset({"backends", "samplers"})}
"""Packages that import each other: a sampler decodes with the backend's model."""

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
    "tinsmith.batch.worker.child": ("sqlalchemy", "starlette", "httpx", "numpy", "obstore", "pyarrow", "torch"),
    "tinsmith.engine.__main__": ("starlette", "uvicorn", "fastapi", "tinker", "peft", "torch", "alembic"),
    "tinsmith.cli.main": ("torch", "transformers", "numpy", "starlette", "sqlalchemy", "httpx", "tinker", "ray"),
    "tinsmith.backends.torch": ("sqlalchemy", "starlette", "uvicorn", "tinker", "peft"),
}

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60

MAX_FIRST_LEVEL = 24

SHARED_NAMES = {"Sample"}
"""Public classes with the name of another: `batch.Sample` is the operation that makes requests of `types.Sample`."""


def source_files() -> list[Path]:
    """All modules, except for generated ones and migrations, which do not change."""
    return [
        path for path in sorted(SOURCE.rglob("*.py")) if path.stem not in GENERATED and path.parent.name != "versions"
    ]


def name_of(path: Path) -> str:
    """The name of a module without `tinsmith.`; that of the package itself is ""."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for path in source_files()}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[str]:
    """The modules of tinsmith that a file imports anywhere, including imports for types."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package != "tinsmith":
                continue
            while module and module not in modules():
                module = module.rpartition(".")[0]
            yield module


@cache
def graph() -> dict[str, set[str]]:
    return {name: set(imports_of(path)) - {name, ""} for name, path in modules().items()}


def cycles() -> list[list[str]]:
    """Groups of modules that import each other, directly or indirectly (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph()[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for name in graph():
        if name not in index:
            visit(name)
    return groups


def test_a_package_imports_only_what_the_table_allows() -> None:
    forbidden = [
        f"{module} imports {other}"
        for module, imports in graph().items()
        for other in sorted(imports)
        if module and (top := module.split(".")[0]) != (below := other.split(".")[0]) and below not in MAY_IMPORT[top]
    ]
    assert not forbidden


def test_only_the_package_db_knows_which_database_it_is() -> None:
    implementations = {"db.sqlite", "db.sqlite_database", "db.postgres_database"}
    importers = {module for module, imports in graph().items() if imports & implementations}
    assert {module for module in importers if not module.startswith("db.")} == set()


def test_compute_and_commands_know_of_the_protocol_only_the_files_of_adapters() -> None:
    importers = {"backends", "samplers", "exchange", "cli"}
    imported = {
        other
        for module, imports in graph().items()
        for other in imports
        if module.split(".")[0] in importers and other.split(".")[0] == "wire"
    }
    assert imported == {"wire.adapter_files"}


def test_the_table_has_a_row_for_each_entry_of_the_first_level() -> None:
    assert set(MAY_IMPORT) == {name.split(".")[0] for name in modules()} - {""}
    assert len(MAY_IMPORT) + 1 <= MAX_FIRST_LEVEL


def test_the_table_has_no_cycle() -> None:
    for package, allowed in MAY_IMPORT.items():
        for other in allowed:
            assert package not in MAY_IMPORT[other] or frozenset({package, other}) in ONE_LAYER, (package, other)


def test_no_module_is_in_an_import_cycle() -> None:
    assert not cycles()


def test_a_public_class_has_a_name_of_its_own() -> None:
    # The OpenAPI document, too, has one schema for each name.
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    shared = {name: owners for name, owners in homes.items() if len(owners) > 1}
    assert set(shared) == SHARED_NAMES, shared


@pytest.mark.matrix(3)
@pytest.mark.parametrize("entry", MUST_NOT_LOAD)
def test_a_process_does_not_load_forbidden_libraries(entry: str) -> None:
    script = f"import {entry}, sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert not set(MUST_NOT_LOAD[entry]) & set(loaded)


# One test for all files: a case for each of them would take longer than what it checks.


def test_files_and_functions_stay_readable() -> None:
    faults: list[str] = []
    for name, path in modules().items():
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            faults.append(f"{name} is too long")
        if not text.isascii():
            faults.append(f"{name} is not ASCII")
        faults += [
            f"{name}: {node.name} is too long"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno > MAX_FUNCTION_LINES
        ]
    assert not faults


def test_every_module_says_what_it_is_for() -> None:
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree_of(path))]


def test_a_cancelled_task_is_cancelled() -> None:
    # Until Python 3.12, wait_for drops a cancellation that arrives at the moment of its result.
    users = [name for name, path in modules().items() if "asyncio.wait_for(" in path.read_text()]
    assert not users, "use `async with asyncio.timeout(...)`"
