"""The server and the client of tests of bulk jobs. Modules with other needs define fixtures of the same names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.live import API_KEY, LiveServer, serving
from tinsmith.batch.client.http import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A live server for the tests of one module, whose engine computes nothing."""
    with serving(tmp_path_factory.mktemp("bulk") / "data", "--backend", "fake") as live_server:
        yield live_server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    """A client of the module's server."""
    batch_client = Client(server.url, API_KEY)
    yield batch_client
    batch_client.close()
