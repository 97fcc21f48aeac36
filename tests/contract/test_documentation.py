"""The documentation site builds without warnings or external resources; its code runs, and its statements hold."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
import tinker
import yaml

from support.live import API_KEY, LiveServer, serving
from tinsmith.exchange.metrics import RunMetrics
from tinsmith.settings import Settings
from tinsmith.settings.groups import PREFIX

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "quickstart.md", *sorted((DOCS / "howto").glob("*.md"))]
EXAMPLES = ROOT / "examples"
Run = Callable[..., str]
MARKS = re.compile(r"<\|\w+\|>|</?think>")
# An example in a page: the language is written so that formatters do not read the line as Python.
SNIPPET = re.compile(r'^``` { \.python }\n--8<-- "(\S+)"\n```$', re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def own_code(page: Path) -> list[str]:
    """The Python code of a page, without the examples that it includes, which have their own tests."""
    return blocks(page, "python")


@pytest.fixture
def run(nano_server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> Run:
    """Run a script in its own directory and return its output. It runs in this process, since each new process would
    first load torch and transformers.
    """
    monkeypatch.setenv("TINKER_BASE_URL", nano_server.url)
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.chdir(tmp_path)

    def call(path: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        said = capsys.readouterr().out
        assert not MARKS.search(said), f"{path.name} prints a mark of the chat format"
        return said

    return call


def numbers(pattern: str, said: str) -> list[float]:
    return [float(digits) for digits in re.findall(pattern, said)]


@pytest.mark.parametrize("page", [page for page in PAGES if own_code(page)], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_in_its_order(page: Path, run: Run, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n".join(own_code(page)))
    said = run(script)
    losses = numbers(r"loss(?: per token)? ([\d.]+)", said)
    assert said and (len(losses) < 2 or losses[-1] < losses[0])
    assert page.stem != "quickstart" or "Say hello. -> ahoy\n" in said


@pytest.mark.extended
def test_tinkerclouds_key_goes_to_a_server_as_the_page_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    page = DOCS / "howto" / "from-tinkercloud.md"
    (prefixes,) = re.findall(r"^export TINSMITH_KEY_PREFIXES='(.*)'$", page.read_text(), re.MULTILINE)
    (key,) = re.findall(r"TINKER_API_KEY=(\S+)$", page.read_text(), re.MULTILINE)
    with serving(tmp_path / "data", "--backend", "fake", settings={"KEY_PREFIXES": prefixes}) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", key)
        script = tmp_path / "script.py"
        script.write_text("\n".join(own_code(page)))
        runpy.run_path(str(script), run_name="__main__")
    assert key == "slime-dev-key" and capsys.readouterr().out.endswith(":train:0 16.0\n")


def test_a_page_on_moving_is_short() -> None:
    for name in ("skyrl", "tinkercloud", "sky-batch", "hosted-tinker"):
        lines = (DOCS / "howto" / f"from-{name}.md").read_text().splitlines()
        assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= 250, name


def test_every_example_is_shown_and_tested() -> None:
    snippets = {path for page in PAGES for path in SNIPPET.findall(page.read_text())}
    assert snippets == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in Path(__file__).read_text(), path.name
        assert f"examples/{path.name}" in (ROOT / "README.md").read_text(), path.name


@pytest.mark.extended
def test_sft_and_evaluation(run: Run) -> None:
    said = run(EXAMPLES / "sft.py")
    losses = numbers(r"loss per token ([\d.]+)", said)
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    (before, after) = map(int, *re.findall(r"(\d+)% before, (\d+)% after", said))
    assert after >= before + 10
    path = said.split()[-1]
    table = run(EXAMPLES / "evaluation.py", path)
    (base, adapter) = map(int, *re.findall(r"pig_latin +(\d+)% \+- \d+% +(\d+)%", table))
    assert adapter >= base + 10


@pytest.mark.extended
def test_rl(run: Run) -> None:
    rewards = numbers(r"mean reward ([\d.]+)", run(EXAMPLES / "rl.py"))
    assert sum(rewards[-3:]) > 1.15 * sum(rewards[:3])


@pytest.mark.extended
def test_dpo(run: Run) -> None:
    said = run(EXAMPLES / "dpo.py")
    losses = numbers(r"loss ([\d.]+)", said)
    assert abs(losses[0] - 0.693) < 0.01 and losses[-1] < 0.8 * losses[0]
    assert numbers(r"preferred (\d+)%", said)[-1] >= 90


@pytest.mark.slow
def test_distillation(run: Run) -> None:
    divergence = numbers(r"per token (-?[\d.]+)", run(EXAMPLES / "distillation.py"))
    assert sum(divergence[-3:]) < 0.7 * sum(divergence[:3])


@pytest.mark.slow
def test_multi_turn(run: Run) -> None:
    rewards = numbers(r"mean reward ([\d.]+)", run(EXAMPLES / "multi_turn.py"))
    assert sum(rewards[-3:]) > 1.1 * sum(rewards[:3])


@pytest.fixture
def run_with_metrics(nano_server: LiveServer) -> str:
    """A run with a client's points."""
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        run_id = service.create_lora_training_client("tinsmith/nano", rank=4).result().model_id
    with RunMetrics(run_id, nano_server.url, API_KEY) as metrics:
        for step in range(1, 6):
            metrics.log({"reward": step / 10, "ppo_kl:mean": 0.5 * step}, step)
    return run_id


@pytest.mark.extended
def test_metrics_are_copied_into_tensorboard(run: Run, run_with_metrics: str, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    said = run(EXAMPLES / "export_metrics.py", run_with_metrics, "tensorboard", str(tmp_path))
    assert said.startswith("5 steps of ")
    events = accumulator.EventAccumulator(str(tmp_path / run_with_metrics.replace(":", "-"))).Reload()
    assert [(scalar.step, round(scalar.value, 6)) for scalar in events.Scalars("reward")] == [
        (step, step / 10) for step in range(1, 6)
    ]
    assert len(events.Scalars("ppo_kl:mean")) == 5


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_metrics_are_copied_into_mlflow(run: Run, run_with_metrics: str, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run(EXAMPLES / "export_metrics.py", run_with_metrics, "mlflow", uri)
    client = mlflow.MlflowClient(uri)
    (mlflow_run,) = client.search_runs(["0"])
    history = client.get_metric_history(mlflow_run.info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(step, step / 10) for step in range(1, 6)]


@pytest.mark.extended
def test_metrics_are_copied_into_wandb(
    run: Run, run_with_metrics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="no wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "5 steps of " in run(EXAMPLES / "export_metrics.py", run_with_metrics, "wandb", "tinsmith-test")
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.extended
def test_the_notebook_runs_and_its_model_learns(nano_server: LiveServer, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="no nbformat")
    nbclient = pytest.importorskip("nbclient", reason="no nbclient")
    for name in ("ipykernel", "matplotlib"):
        pytest.importorskip(name, reason=f"no {name}")
    book = nbformat.read(EXAMPLES / "notebooks" / "sft_to_rl.ipynb", as_version=4)
    assert len(book.cells) == 10
    credentials = {"TINKER_BASE_URL": nano_server.url, "TINKER_API_KEY": API_KEY}
    client = nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | credentials)
    said = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", ()))
    before, taught, reinforced = numbers(r"right: ([\d.]+)%", said)
    assert taught > before + 10 and reinforced > taught


def test_the_notebook_was_run_and_names_no_machine() -> None:
    text = (EXAMPLES / "notebooks" / "sft_to_rl.ipynb").read_text()
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum('"image/png"' in json.dumps(cell["outputs"]) for cell in code) == 2
    assert not re.search(r"/(home|root|tmp|work)/|tml-(?!local)", text) and len(text) < 200_000


@pytest.mark.extended
def test_captured_agent(run: Run) -> None:
    rewards = numbers(r"mean reward ([\d.]+)", run(EXAMPLES / "captured_agent.py"))
    assert len(rewards) == 6 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.2


def script(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_reference_matches_the_code() -> None:
    for name, page in script("write-reference").PAGES.items():
        assert (DOCS / "reference" / name).read_text() == page(), "run scripts/write-reference"


def test_commands_of_the_pages_use_variables_that_there_are() -> None:
    setting_variables = {PREFIX + name.upper() for name in Settings.model_fields}
    for page in DOCS.rglob("*.md"):
        mentions = set(re.findall(rf"\b{PREFIX}[A-Z_]+[A-Z]\b", page.read_text()))
        assert mentions <= setting_variables, f"{page.name} names {sorted(mentions - setting_variables)}"


def test_the_yaml_of_the_pages_is_yaml() -> None:
    for page in DOCS.rglob("*.md"):
        for block in blocks(page, "yaml"):
            assert yaml.safe_load(block)


def test_troubleshooting_quotes_words_that_the_source_has() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "tinsmith").rglob("*.py"))
    words = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that span several lines
    quoted = [
        phrase
        for line in (DOCS / "troubleshooting.md").read_text().splitlines()
        if line.startswith("|")
        for phrase in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(quoted) > 30
    # Typer's own, and a word of the SDK.
    missing = [phrase for phrase in quoted if phrase not in words and phrase != "No such command"]
    assert not missing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    directory = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return directory


class Loaded(HTMLParser):
    """The resources that a browser loads by itself, and whether a page has text."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed"):
            self.addresses.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.addresses.append(attributes.get("href") or "")


@pytest.mark.extended
def test_the_site_loads_no_external_resources(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        foreign = [address for address in loaded.addresses if re.match(r"(https?:)?//", address)]
        assert not foreign, f"{page.name} loads {foreign}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import\s*)['\"]?(https?:)?//", sheet.read_text()), sheet.name


def test_the_site_shows_examples_tables_and_pictures(site: Path) -> None:
    assert "importance_sampling" in (site / "howto" / "rl.html").read_text()
    assert "--8&lt;--" not in (site / "howto" / "rl.html").read_text()
    concepts = (site / "concepts.html").read_text()
    for picture in re.findall(r"images/(\w+\.svg)", concepts):
        assert (site / "images" / picture).is_file()
    assert "tinsmith_queue_requests" in (site / "metrics.html").read_text()


def test_each_page_is_in_the_navigation_once() -> None:
    navigation = re.findall(r"[\w./-]+\.md\b", (ROOT / "mkdocs.yml").read_text())
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(navigation) == sorted(pages), "mkdocs.yml has the navigation"
