"""`tinsmith bench`: two live servers side by side, through the real SDK."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from support.live import API_KEY, LiveServer, free_port, serving
from tinsmith.cli import bench
from tinsmith.cli.bench import MEASURES, Comparison, Figure, Measure
from tinsmith.cli.main import app, output
from tinsmith.errors import SettingsError


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("other") / "data", "--backend", "fake") as server:
        yield server


def run(*flags: str) -> Result:
    output.width = 200  # its width is otherwise that of the terminal in which the first test imported it
    return CliRunner().invoke(app, ["bench", "--key", API_KEY, "--runs", "2", *flags])


def test_two_servers_side_by_side(fake_server: LiveServer, other_server: LiveServer) -> None:
    answer = run("--url", fake_server.url, "--url", other_server.url, "--json")
    assert answer.exit_code == 0, answer.output
    rows = json.loads(answer.stdout)
    assert [row["measure"] for row in rows] == [measure.name for measure in MEASURES]
    for row in rows:
        first, second = row["servers"]
        assert (first["url"], second["url"]) == (fake_server.url, other_server.url)
        assert first["model"] == second["model"] == "tinsmith/nano"
        for server in row["servers"]:
            assert server["error"] is None
            assert 0 < server["least"] <= server["value"] <= server["most"]
        assert first["ratio"] == 1.0
        better = second["value"] / first["value"]
        assert second["ratio"] == pytest.approx(better if row["unit"] == "tokens/s" else 1 / better)


def test_a_table_names_the_servers_and_what_one_cannot_do(fake_server: LiveServer, other_server: LiveServer) -> None:
    urls = ("--url", fake_server.url, "--url", other_server.url)
    answer = run(*urls, "--model", "tinsmith/nano", "--model", "no/such")
    assert answer.exit_code == 1
    assert fake_server.url in answer.output and other_server.url in answer.output
    assert "no/such" in answer.output
    for measure in MEASURES:
        assert measure.name in answer.output
        assert f"{measure.name} at {other_server.url}: " in answer.output
        assert f"{measure.name} at {fake_server.url}: " not in answer.output


def test_an_address_where_nobody_is_is_refused_at_once(fake_server: LiveServer) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SettingsError, match=f"no server answers at {url}.*tinsmith serve"):
        bench.bench_as_json([bench.BenchTarget(url, API_KEY)], runs=1, rank=1, patience_s=1)


def test_as_many_models_as_servers_or_one(fake_server: LiveServer) -> None:
    answer = run("--url", fake_server.url, "--model", "a", "--model", "b")
    assert isinstance(answer.exception, SettingsError)
    assert "--model is given 2 times and --url 1;" in str(answer.exception)


def test_without_the_sdk_it_says_what_to_do(fake_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    answer = run("--url", fake_server.url)
    assert isinstance(answer.exception, SettingsError)
    assert "pip install 'tinsmith[demo]'" in str(answer.exception)


def test_ratios_say_how_many_times_as_good() -> None:
    def row(*, is_rate: bool, values: tuple[float, ...]) -> Comparison:
        return Comparison(Measure("m", lambda _client: 1, is_rate), tuple(Figure([value]) for value in values))

    assert row(is_rate=True, values=(100, 300)).ratio(1) == 3.0
    assert row(is_rate=False, values=(100, 300)).ratio(1) == pytest.approx(1 / 3)
    assert row(is_rate=False, values=(100, 300)).ratio(0) == 1.0


def test_a_median_of_what_counted() -> None:
    assert Figure([1.0, 9.0, 2.0]).value == 2.0
    assert Figure([1.0], error="it broke").value is None
