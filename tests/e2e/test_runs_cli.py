"""`tinsmith runs` and `tinsmith checkpoints list` against a live server print the values of the SDK's results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

import tinsmith
from support.live import API_KEY, LiveServer
from tinsmith.cli.main import app
from tinsmith.cli.runs import BARS, _bars

TOKENS = list(range(40, 60))
STEPS = 4


class Runs:
    """Two runs that differ in their learning rate, and the losses that their passes returned."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
        self.rates = (1e-2, 1e-3)
        self.ids: list[str] = []
        self.losses: list[list[float]] = []
        for rate in self.rates:
            client = self.service.create_lora_training_client(
                "tinsmith/nano", rank=8, user_metadata={"lr": str(rate)}
            ).result()
            self.ids.append(client.get_info().model_id)
            self.losses.append([self._step(client, rate) for _ in range(STEPS)])
            self.path = client.save_state("kept").result().path

    @staticmethod
    def _step(client: tinker.TrainingClient, rate: float) -> float:
        inputs = {"target_tokens": np.array(TOKENS[1:]), "weights": np.ones(len(TOKENS) - 1, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
        passed = client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=rate)).result()
        return passed.metrics["loss:sum"]

    def cli(self, *words: str, status: int = 0, columns: int = 300) -> str:
        environment = {"TINKER_BASE_URL": self.server.url, "TINKER_API_KEY": API_KEY, "COLUMNS": str(columns)}
        outcome = CliRunner().invoke(app, words, env=environment)
        assert outcome.exit_code == status, outcome.output + repr(outcome.exception)
        return outcome.output

    def json(self, *words: str) -> object:
        return json.loads(self.cli(*words, "--json"))


@pytest.fixture(scope="module")
def runs(nano_server: LiveServer) -> Iterator[Runs]:
    yield Runs(nano_server)


def test_a_list_has_the_newest_run_first_and_whole_ids(runs: Runs) -> None:
    rows = runs.json("runs", "list", "--limit", "2")
    assert isinstance(rows, list)
    assert [run["model_id"] for run in rows] == runs.ids[::-1]
    printed = runs.cli("runs", "list", columns=80)
    assert all(f"{run_id} " in printed and "tinsmith/nano" in printed for run_id in runs.ids)
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed, "no cell is cut, however narrow the terminal"


def test_a_search_finds_one_run(runs: Runs) -> None:
    rows = runs.json("runs", "list", "--search", runs.ids[0])
    assert isinstance(rows, list)
    assert [run["model_id"] for run in rows] == runs.ids[:1]


def test_a_run_shows_the_losses_that_the_sdk_got(runs: Runs) -> None:
    run_detail = runs.json("runs", "show", runs.ids[1])
    assert isinstance(run_detail, dict)
    np.testing.assert_allclose([value for _, value in run_detail["series"]["loss:sum"]], runs.losses[1], rtol=1e-6)
    assert run_detail["user_metadata"] == {"lr": "0.001"}
    printed = runs.cli("runs", "show", runs.ids[1])
    assert f"{runs.losses[1][-1]:.5g}" in printed
    assert runs.ids[1] in printed  # no character was rendered as an emoji


def test_a_comparison_names_what_differs(runs: Runs) -> None:
    comparison = runs.json("runs", "compare", *runs.ids)
    assert isinstance(comparison, dict)
    assert comparison["differences"]["metadata lr"] == ["0.01", "0.001"]
    assert "rank" not in comparison["differences"]
    np.testing.assert_allclose(comparison["metrics"]["loss:sum"], [losses[-1] for losses in runs.losses], rtol=1e-6)
    assert "name at least two" in runs.cli("runs", "compare", runs.ids[0], status=2)


def test_a_tail_prints_the_newest_steps(runs: Runs) -> None:
    lines = runs.cli("runs", "tail", "-n", "2", runs.ids[0]).splitlines()
    assert [line.split("step ")[1].split()[0] for line in lines] == [str(STEPS - 1), str(STEPS)]
    assert f"loss:sum={runs.losses[0][-1]:.5g}" in lines[-1]
    assert runs.cli("runs", "tail", "-n", "0", runs.ids[0]) == ""


def test_an_unknown_run_is_refused(runs: Runs) -> None:
    for command in ("show", "tail"):
        assert "error: " in runs.cli("runs", command, "nothing", status=2)


def test_checkpoints_are_listed(runs: Runs) -> None:
    rows = runs.json("checkpoints", "list", "--run", runs.ids[1])
    assert isinstance(rows, list)
    assert [row["tinker_path"] for row in rows] == [runs.path]
    assert runs.path in runs.cli("checkpoints", "list", columns=80)


def test_a_curve_has_the_shape_of_its_values() -> None:
    assert _bars([0.0, 1.0]) == BARS[0] + BARS[-1]
    assert _bars([3.0]) == BARS[0]
    assert len(_bars(list(range(1000)))) <= 24
    assert _bars(list(range(1000))) == "".join(sorted(_bars(list(range(1000)))))


def test_a_run_is_found_by_its_name_and_by_the_beginning_of_its_id(runs: Runs) -> None:
    run_id = runs.ids[0]
    assert run_id in runs.cli("runs", "show", run_id[:-1] if not runs.ids[1].startswith(run_id[:-1]) else run_id)
    refused = runs.cli("runs", "show", run_id.partition(":")[0], status=2)
    assert f"is one of 2: {runs.ids[1]}, {runs.ids[0]}; give more of its id" in " ".join(refused.split())
    assert "run 'no-such-run' is unknown; `tinsmith runs list` shows ids and names" in " ".join(
        runs.cli("runs", "show", "no-such-run", status=2).split()
    )
    httpx.put(
        f"{runs.server.url}/api/v1/dashboard/runs/{run_id}",
        json={"name": "first try", "tags": ["a", "b"]},
        headers={"X-API-Key": API_KEY},
    ).raise_for_status()
    run = runs.json("runs", "show", "first try")
    assert isinstance(run, dict)
    assert (run["model_id"], run["name"], run["tags"]) == (run_id, "first try", ["a", "b"])
    rows = runs.json("runs", "list", "--limit", "2")
    assert isinstance(rows, list)
    assert [row["name"] for row in rows] == [None, "first try"]
    printed = runs.cli("runs", "list")
    assert "first try" in printed and f"nano {time.strftime('%Y-')}" in printed


def test_a_run_shows_whether_it_runs_is_done_or_has_diverged(runs: Runs) -> None:
    def train(rate: float) -> str:
        with tinker.ServiceClient(base_url=runs.server.url, api_key=API_KEY) as service:
            client = service.create_lora_training_client("tinsmith/nano", rank=8).result()
            for _ in range(STEPS):
                runs._step(client, rate)
            run_id = client.get_info().model_id
            assert tinsmith.console_url(client) == f"{runs.server.url}/#/runs/{quote(run_id, safe='')}"
            logged = {"model_id": run_id, "step": 1, "metrics": {"accuracy": 0.5}}
            http = {"json": logged, "headers": {"X-API-Key": API_KEY}}
            httpx.post(f"{runs.server.url}/api/v1/log_metrics", **http).raise_for_status()
            card = tinsmith.show(client)
            assert (card.run_id, card.base_model, card.step) == (run_id, "tinsmith/nano", STEPS)
            assert card.status in repr(card) and "loss_per_token" in card.metrics
            assert next(iter(card.metrics.items())) == ("accuracy", 0.5), "what the client logged comes first"
            assert (
                f'href="{card.url}"' in card._repr_html_() and tinsmith.show(run_id, runs.server.url, API_KEY) == card
            )
            running = runs.json("runs", "show", run_id)
            assert isinstance(running, dict) and running["status"] == ("running" if rate < 1 else "diverged")
            return run_id

    done = runs.json("runs", "show", train(1e-3))
    assert isinstance(done, dict)
    assert (done["status"], done["status_reason"]) == ("finished", None) and 0 < done["duration_s"] < 600
    diverged = runs.json("runs", "show", train(1000.0))
    assert isinstance(diverged, dict) and diverged["status"] == "diverged"
    assert "step 4" in diverged["status_reason"], diverged["status_reason"]
