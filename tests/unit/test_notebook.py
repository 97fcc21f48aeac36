"""What objects of the client show in a notebook and in a terminal: whole, escaped, and without a request to a server
that is away for longer than a moment.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tinsmith import batch
from tinsmith.batch.client import job as job_module
from tinsmith.batch.client.http import Client
from tinsmith.batch.client.job import Job, Report, progress_of
from tinsmith.batch.client.sky_pools import PoolRequest
from tinsmith.errors import TinsmithError
from tinsmith.exchange.console_urls import ConsoleUrl
from tinsmith.exchange.metrics import RunMetrics
from tinsmith.exchange.run_cards import MAX_METRICS, RunCard, choose_metrics
from tinsmith.exchange.trajectories import CapturedTrajectory
from tinsmith.runtime import notebook
from tinsmith.runtime.notebook import MAX_CHARACTERS, MAX_ROWS, LiveDisplay, card, table

EVIL = '<img src=x onerror="alert(1)">'
STATUS: dict[str, Any] = {
    "job_id": 7, "name": EVIL, "pool": "local", "status": "RUNNING", "total_rows": 100, "rows_ok": 40, "rows_failed": 2,
    "tokens_in": 10, "tokens_out": 20, "batch_total_batches": 10, "batch_completed_batches": 4, "created_at": 0.0,
    "started_at": 1.0, "ended_at": 11.0, "outputs": [{"path": "out.jsonl"}], "workers": [], "error": None,
}  # fmt: skip


class Elements(HTMLParser):
    """The elements and the text of HTML; fails if an element is not closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on") or name == "src"]
        self.names.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


class CannedClient(Client):
    """A client whose server gives these statuses of a job, or none."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__("http://127.0.0.1:1", "tml-secret")
        self.answers = answers

    def status(self, job_id: int, patience_s: float | None = None) -> dict[str, Any]:
        if not self.answers:
            assert patience_s is not None and patience_s <= job_module.LOOK_S
            raise TinsmithError("no connection to http://127.0.0.1:1")
        return self.answers[-1] | {"job_id": job_id}

    def statuses(self, job_id: int) -> Iterator[dict[str, Any]]:
        yield from (answer | {"job_id": job_id} for answer in self.answers)


TRAJECTORY = CapturedTrajectory("t1", EVIL, 1.0, ["base"], 2, [1, 2, 3], [False, True, True], [0.0] * 3, [], [])
RUN = RunCard("r:train:0", EVIL, "tinsmith/nano", "running", "", 3, {EVIL: 0.5, "loss": None}, ConsoleUrl("http://h/"))
OBJECTS = {
    "job": Job(7, CannedClient(STATUS)),
    "progress": progress_of(STATUS),
    "report": Report(1.0, 2.0, 0.5, 3, 1, 2, 3, 4, 5, 0.25),
    "dataset": batch.from_items([{"text": EVIL}]).limit(1),
    "dry run": batch.from_items([{"text": EVIL}]).map(lambda row: {"loud": row["text"].upper()}).dry_run(),
    "pools": PoolRequest([{"name": EVIL, "workers": 2, "jobs": []}]),
    "pool": PoolRequest(EVIL),
    "metrics": RunMetrics(EVIL, "http://127.0.0.1:1", "tml-secret"),
    "trajectory": TRAJECTORY,
    "run": RUN,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_shown_as_whole_escaped_html_without_scripts(name: str) -> None:
    content = OBJECTS[name]._repr_html_()
    elements = Elements(content)
    assert not {"script", "img", "style", "link", "iframe"} & set(elements.names)
    assert "tml-secret" not in content


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_has_a_line_without_its_data(name: str) -> None:
    text = repr(OBJECTS[name])
    assert "\n" not in text and " object at 0x" not in text and "tml-secret" not in text and len(text) < 400


def test_a_job_shows_its_state_and_links_to_its_page() -> None:
    content = OBJECTS["job"]._repr_html_()
    assert 'href="http://127.0.0.1:1/#/jobs/7"' in content and 'aria-valuenow="40"' in content
    text = Elements(content).text
    assert EVIL in text and "RUNNING" in text and "4 of 10" in text and "40 of 100" in text and "out.jsonl" in text


def test_a_job_whose_server_is_away_says_so() -> None:
    text = Elements(Job(7, CannedClient())._repr_html_()).text
    assert "Bulk job 7" in text and "no connection" in text


def test_representations_name_what_matters() -> None:
    data = batch.read_json("texts.jsonl").limit(5)
    assert repr(data) == "Dataset(JsonReader(path='texts.jsonl'), limit=5)"
    mapped = data.sample("tinsmith/nano", prompt="text")
    mapped._forgotten = False
    assert repr(mapped) == "Dataset(JsonReader(path='texts.jsonl'), steps=['sample'], limit=5)"
    assert repr(OBJECTS["dry run"]) == "DryRun(1 rows, 0 failed)"
    assert repr(TRAJECTORY).endswith("3 tokens, 2 sampled, 2 exchanges)")
    assert repr(CannedClient()) == "Client('http://127.0.0.1:1')"


def test_a_data_set_without_output_says_so_in_a_notebook() -> None:
    data = batch.from_items([{"n": 1}]).map(lambda row: row)
    text = Elements(data._repr_html_()).text
    data._forgotten = False
    assert "no output" in text


def test_a_card_has_the_newest_metrics_of_the_client_before_the_key_ones_of_the_server() -> None:
    trained = {"entropy": 1.0, "rows:sum": 4.0, "grad_norm": 0.5, "loss_per_token": 0.25}
    points = [
        {"source": "client", "step": 1, "metrics": {"reward": 0.1, "test/nll": 2.0}},
        {"source": "client", "step": 2, "metrics": {"accuracy": 0.5, "entropy": 3.0, "reward": 0.2}},
        {"source": "server", "step": 3, "metrics": trained},
    ]
    client = [("reward", 0.2), ("accuracy", 0.5), ("entropy", 3.0), ("test/nll", 2.0)]
    assert list(choose_metrics(points, trained).items()) == [*client, ("loss_per_token", 0.25), ("grad_norm", 0.5)]
    many = [{"source": "client", "step": 1, "metrics": {f"m{number}": 0.0 for number in range(50)}}]
    names = list(choose_metrics(many, trained))
    assert len(names) == MAX_METRICS and names[-3:] == ["loss_per_token", "grad_norm", "entropy"]


def test_long_values_and_tables_are_cut() -> None:
    text = Elements(card("t", {"long": "x" * 2 * MAX_CHARACTERS, "none": None, "empty": ""})).text
    assert f"({2 * MAX_CHARACTERS} characters)" in text and "none" not in text and "empty" not in text
    rows = [{"n": index} for index in range(MAX_ROWS + 5)]
    assert Elements(table("Rows", rows)).names.count("tr") == MAX_ROWS + 1
    assert f"{MAX_ROWS + 5} rows" in table("Rows", rows)
    assert "0 rows" in table("Rows", [])


# Progress.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class RecordedKernel(ModuleType):
    """IPython in the kernel of a notebook, which records what is displayed and replaced."""

    def __init__(self) -> None:
        super().__init__("IPython")
        self.states: list[tuple[str, dict[str, str]]] = []
        self.display = ModuleType("IPython.display")
        self.display.display = self.begin  # type: ignore[attr-defined]

    def get_ipython(self) -> SimpleNamespace:
        return SimpleNamespace(kernel=object())

    def begin(self, state: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw and display_id
        self.states.append(("display", state))
        return SimpleNamespace(update=self.update)

    def update(self, state: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.states.append(("update", state))


STATUSES = [STATUS | {"batch_completed_batches": done} for done in (0, 5)] + [
    STATUS | {"batch_completed_batches": 10, "status": "SUCCEEDED"}
]


def test_waiting_replaces_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "EVERY_S", 0.0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert Job(7, CannedClient(*STATUSES)).wait()["status"] == "SUCCEEDED"
    first, second, last = [line.removesuffix("\x1b[K") for line in terminal.getvalue().strip().split("\r")]
    assert first.startswith("Job 7 [--------------------] 0/10 batches, RUNNING")
    assert "5/10" in second and last.startswith("Job 7 [####################] 10/10 batches, SUCCEEDED")
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().endswith("\n")


def test_waiting_is_silent_in_a_log_and_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, progress in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        Job(7, CannedClient(*STATUSES)).wait(progress=progress)
        assert stream.getvalue() == ""


def test_waiting_replaces_one_card_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "EVERY_S", 0.0)
    kernel, terminal = RecordedKernel(), Terminal()
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", kernel.display)
    monkeypatch.setattr(sys, "stderr", terminal)
    Job(7, CannedClient(*STATUSES)).wait()
    assert [kind for kind, _ in kernel.states] == ["display", "update", "update"]
    assert [re.findall(r'valuenow="(\d+)"', state["text/html"]) for _, state in kernel.states] == [
        ["0"],
        ["50"],
        ["100"],
    ]
    assert "10/10 batches" in kernel.states[-1][1]["text/plain"] and terminal.getvalue() == ""


@pytest.mark.extended
def test_a_kernel_replaces_the_state() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    lines = [
        "from tinsmith.runtime import notebook",
        "notebook.EVERY_S = 0",
        "with notebook.LiveDisplay() as display:",
        "    display.show('first', notebook.card('first', {}))",
        "    display.show('last', notebook.card('last', {}))",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("\n".join(lines))])
    nbclient.NotebookClient(book, timeout=120).execute()
    (output,) = book.cells[0].outputs
    assert output["data"] == {"text/html": card("last", {}), "text/plain": "last"}


def test_states_in_quick_succession_are_skipped_but_never_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.0, *[100.01] * 50])
    monkeypatch.setattr(notebook, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    terminal = Terminal()
    with LiveDisplay(terminal) as display:
        for step in range(5):
            display.show(f"step {step}", "")
    assert re.findall(r"step \d", terminal.getvalue()) == ["step 0", "step 4"]


def test_a_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    with LiveDisplay(terminal) as display:
        display.show("x" * 100, "")
    assert terminal.getvalue().count("x") == 39
