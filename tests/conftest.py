"""Fixtures that more than one test file uses: live servers and real SDK clients."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Set before the import of libraries that read them.
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.environ.get("TEST_DEVICE", "").startswith("cuda"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # its kernels run on a CPU

import pytest
import tinker
from tinker.lib import internal_client_holder

from support import databases, generators, properties, shards
from support.live import API_KEY, LiveServer, serving
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database

if TYPE_CHECKING:
    from support.compatibility import Witness
    from support.engine_bench import Bench
    from support.http_harness import Harness


SHARD_FILES = pytest.StashKey[set[Path] | None]()
"""The files of `--shard`; None runs all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--database", choices=databases.KINDS, default=databases.SQLITE, help="what the tests and their servers run on"
    )
    parser.addoption(
        "--shard", default="", help="2/8 runs the files of the second of eight parts of about equal length"
    )


EXTENDED = {"e2e", "fault", "cluster", "fuzz", "browser", "recipes"}
"""In these directories `make test` runs only tests marked `smoke`: one journey of each kind."""


LONG_FILES = [
    "e2e/test_demo.py",
    "fault/crash/test_matrix.py",
    "contract/test_isolation.py",
    "fault/crash/test_engines.py",
    "integration/test_batch_operations_live.py",
    "e2e/test_capture_live.py",
    "e2e/test_responses_live.py",
    "e2e/test_openai_live.py",
    "e2e/test_journeys.py",
    "integration/test_batch_jobs.py",
    "unit/test_nano.py",
    "cluster/test_ranks.py",
    "contract/test_sdk_surface.py",
    "integration/test_batch_smoke.py",
    "unit/test_local_sampler.py",
    "integration/test_settling.py",
    "contract/test_documentation.py",
    "integration/test_batch_resume.py",
    "integration/test_external_sampler.py",
    "unit/test_vision_sampling.py",
    "e2e/test_openai_tokens_live.py",
    "unit/test_vision.py",
    "fault/test_recovery.py",
    "unit/test_deterministic.py",
    "unit/test_fake_cuda.py",
    "fault/test_robustness.py",
    "e2e/test_checkpoint_cli.py",
    "unit/test_architecture.py",
    "unit/test_expert_choice.py",
    "unit/test_memory_budget.py",
    "browser/test_dashboard.py",
    "fault/test_batch_kill.py",
    "e2e/test_checkpoint_sdk.py",
    "integration/test_hub.py",
    "contract/test_wire.py",
    "integration/test_openai_batches.py",
    "fault/test_supervisor.py",
    "integration/test_gpu_folder.py",
    "integration/test_security.py",
    "e2e/test_batch_cli.py",
    "unit/test_adjusting.py",
    "integration/test_many_polls.py",
    "integration/test_sampler_memory.py",
    "unit/test_db.py",
    "cluster/test_dedicated_samplers.py",
    "unit/test_plan.py",
]
"""The slowest files, slowest first. They start first, so that the workers of `make test` end together."""


ON_POSTGRES = {"unit/test_db.py", "unit/test_futures.py", "unit/test_batch_state.py"}
"""The files whose tests `make test` runs on both kinds of database; of the others it runs those on SQLite."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests_directory = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests_directory)
        is_extended = path.parts[0] in EXTENDED and not item.get_closest_marker("smoke")
        if is_extended or (_database_of(item) == databases.POSTGRES and path.as_posix() not in ON_POSTGRES):
            item.add_marker(pytest.mark.extended)
    _extend_matrices(items)
    order = {name: position for position, name in enumerate(LONG_FILES)}
    # The sort is stable: the tests of a file keep their order.
    items.sort(key=lambda item: order.get(item.path.relative_to(tests_directory).as_posix(), len(order)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other shards are not imported."""
    if (files := config.stash[SHARD_FILES]) is None or not collection_path.name.startswith("test_"):
        return None
    return True if collection_path.suffix == ".py" and collection_path not in files else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the tests import stays, and the garbage collector takes half a second to look through it: it waits until all
    is imported, and leaves it out then.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _database_of(item: pytest.Item) -> object:
    return (
        item.callspec.params.get("database_kind")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else None
    )


def _extend_matrices(items: list[pytest.Item]) -> None:
    """Mark the cases of `matrix(n)` that `make test` leaves out: it runs n of them, spread over their list."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix") and not item.get_closest_marker("extended"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        marker = cases[0].get_closest_marker("matrix")
        assert marker is not None
        (count,) = marker.args
        chosen = {round(i * (len(cases) - 1) / max(count - 1, 1)) for i in range(count)}
        for position, case in enumerate(cases):
            if position not in chosen:
                case.add_marker(pytest.mark.extended)


def pytest_configure(config: pytest.Config) -> None:
    directory = Path(__file__).parent
    shard = config.getoption("--shard")
    try:
        files = shards.files_of(shard, directory, directory.rglob("test_*.py")) if shard else None
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[SHARD_FILES] = files
    databases.chosen = config.getoption("--database")
    properties.load_profile()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    """What a fixture of several tests draws does not depend on which of them runs first."""
    if fixturedef.scope != "function":
        generators.seed(f"{request.node.nodeid}::{fixturedef.argname}")


@pytest.fixture(autouse=True)
def seeded_generators(request: pytest.FixtureRequest) -> None:
    """A test that draws from a global generator draws the same in every run."""
    generators.seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def no_remembered_clients() -> None:
    """Clear the SDK's cache of clients without a session. Its key ignores the environment, so a command in this process
    would use the server of an earlier test.
    """
    internal_client_holder.sessionless_holder_cache._holders.clear()


@pytest.fixture(params=databases.KINDS)
def database_kind(request: pytest.FixtureRequest) -> str:
    """The kind of database; a test runs once for each."""
    return request.param


@pytest.fixture
def database_url(tmp_path: Path, database_kind: str) -> str:
    return databases.fresh_url(tmp_path, database_kind)


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """A migrated, empty database."""
    database = open_database(database_url)
    yield database
    database.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """The application and its services in this process, without an engine."""
    from support import http_harness

    new_harness = http_harness.make_harness(tmp_path)
    yield new_harness
    http_harness.close(new_harness)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An engine in this process, without a server process."""
    from support.engine_bench import Bench

    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="tn-") as sockets:
        new_bench = Bench(tmp_path, Path(sockets))
        yield new_bench
        new_bench.close()


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live server whose engine computes nothing."""
    with serving(tmp_path_factory.mktemp("fake") / "data", "--backend", "fake") as server:
        yield server


@pytest.fixture(scope="session")
def nano_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live server with the embedded model."""
    with serving(tmp_path_factory.mktemp("nano") / "data") as server:
        yield server


@pytest.fixture
def fake_service(fake_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    yield from _service(fake_server)


@pytest.fixture
def nano_service(nano_server: LiveServer) -> Iterator[tinker.ServiceClient]:
    yield from _service(nano_server)


def _service(server: LiveServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        yield service


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model with random weights, which can be served."""
    from support import tiny_models

    directory = tmp_path_factory.mktemp("tiny")
    tiny_models.make(directory)
    return directory


@pytest.fixture(autouse=True)
def witness(request: pytest.FixtureRequest) -> Iterator[Witness | None]:
    """Check a test's declared coverage: it calls every method and endpoint that it names."""
    names = {name for mark in request.node.iter_markers("covers") for name in mark.args}
    if not names:
        yield None
        return
    from support.compatibility import Witness

    new_witness = Witness(request.getfixturevalue("monkeypatch"))
    yield new_witness
    missing = new_witness.missing(names)
    assert not missing, f"says that it covers {sorted(missing)}, and does not"
