"""The documents match the code: every setting, flag, loss and package is documented. They also stay short.
test_routes_service.py compares the routes with docs/wire.md."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from tinsmith.cli.main import app
from tinsmith.losses import DUAL_CLIP, LOSSES, ROLLOUT_MAX
from tinsmith.settings import Settings

ROOT = Path(__file__).parents[2]
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
# Every flag of every command. A new flag must be added here and to docs/settings.md.
FLAGS = {
    "serve": {
        "base_models",
        "--model",
        "-m",
        "--role",
        "--engines",
        "--samplers",
        "--host",
        "--port",
        "--health-port",
        *("--machines", "--peer-host"),
        *("--models-from", "--allow-model", "--idle-minutes", "--on-demand-bytes"),
        "--data-dir",
        "--device",
        "--dtype",
        "--deterministic",
        "--quantize",
        "--data-parallel",
        "--tensor-parallel",
        "--context-parallel",
        "--expert-parallel",
        "--pipeline-parallel",
        "--shard-base",
        "--profile",
        "--backend",
        "--vision",
        "--tool-parser",
        *("--log-level", "--sampler", "--sampler-url", "--sampler-options", "--sampler-loaded-adapters"),
        *("--sampler-sequences", "--kv-cache-bytes", "--database-url", "--storage-dir", "--session-timeout-s"),
        *("--session-sweep-s", "--backend-options"),
        "--quiet",
        "--json",
    },
    "demo": {"--data-dir", "--stay", "--json"},
    "doctor": {
        *("model", "--model", "-m", "--data-dir", "--gpus", "--memory", "--rank", "--adapters", "--context", "--dtype"),
        *("--quantize", "--tensor-parallel", "--data-parallel", "--context-parallel", "--expert-parallel"),
        *("--pipeline-parallel", "--shard-base", "--json", "--machines", "--measure"),
    },
    "rank": {"--join", "--ranks", "--model", "-m", "--data-dir"},
    "bench": {"--url", "--model", "--key", "--dialect", "--runs", "--rank", "--timeout", "--json"},
    "batch submit": {
        *("function", "--input", "-i", "--output", "-o", "--errors", "--batch-size", "--pool", "--fn-kwargs"),
        *("--sample", "--sample-options"),
        *(
            "--batched",
            "--rows",
            "--max-failed-rows",
            "--name",
            "--weight",
            "--priority",
            "--resume-from",
            "--limit",
            "--option",
        ),
        *("--if-exists", "--detach", "-d", "--yes", "-y", "--json"),
    },
    "samplers list": {"--json", "--data-dir"},
    **{f"samplers {verb}": {"name", "--json", "--data-dir"} for verb in ("show", "drain", "sleep")},
    "samplers wake": {"name", "--json", "--data-dir"},
    "batch list": {"--limit", "--json"},
    "batch show": {"job_id", "--json"},
    "batch logs": {"job_id", "--follow", "-f", "--json"},
    "batch errors": {"job_id", "--full", "--limit", "--after", "--json"},
    "batch cancel": {"job_id", "--yes", "-y", "--json"},
    "batch purge": {"job_ids", "--all", "--yes", "-y", "--json"},
    "batch resume": {"job_id", "--output", "-o", "--format", "--detach", "-d", "--json"},
    "batch export": {"job_id", "target", "--output", "-o", "--if-exists", "--yes", "-y", "--json"},
    "batch pools": {"--json"},
    "batch task": {"pool", "--machines", "--json"},
    "runs list": {"--search", "--limit", "--json"},
    "runs show": {"run_id", "--json"},
    "runs compare": {"run_ids", "--json"},
    "runs log": {"run_id", "file", "--follow", "-f", "--json"},
    "runs tail": {"run_id", "--steps", "-n", "--follow", "-f", "--json"},
    "checkpoints list": {"--run", "--limit", "--json"},
    "checkpoints pull": {"path", "directory", "--json"},
    "checkpoints push": {"directory", "--base", "--name", "--ttl", "--json"},
    "checkpoints import": {"directory", "--base", "--name", "--ttl", "--base-directory", "--json"},
    "checkpoints merge": {
        *("adapter", "directory", "--base", "--dtype", "--max-shard-gb", "--gguf", "--llama-cpp", "--json")
    },
    "up": {
        *("--ray", "--engines", "--samplers", "--batch-workers", "--engine-cpus", "--engine-gpus", "--engine-resource"),
        *("--sampler-cpus", "--sampler-gpus", "--sampler-resource"),
        *("--batch-worker-cpus", "--batch-worker-gpus", "--batch-worker-resource"),
        *("--tokens-per-engine", "--tokens-per-sampler", "--batches-per-worker", "--up-after", "--down-after"),
        *("--model", "-m", "--backend", "--machines", "--data-dir", "--json"),
    },
    "status": {"--ray", "--data-dir", "--json"},
    "down": {"--ray", "--data-dir", "--patience", "--json"},
    "migrate": {"--data-dir", "--json"},
    "profile": {"base_model", "--seconds", "--stop", "--data-dir", "--json"},
    "keys create": {"tenant", "--name", "--quota", "--data-dir", "--json"},
    "keys list": {"--json", "--data-dir"},
    "keys revoke": {"key_id", "--data-dir", "--json"},
}


def test_every_setting_is_documented_with_its_own_words() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, f"{name} has no docstring"
        assert f"`TINSMITH_{name.upper()}`" in DOCS["settings.md"], f"{name} is not in docs/settings.md"
        assert " ".join(field.description.split()) in " ".join(DOCS["settings.md"].split()), f"{name} has changed"


def test_the_flags_of_the_commands_are_the_documented_ones() -> None:
    subcommands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for group in [name for name, sub in subcommands.items() if hasattr(sub, "commands")]:
        subcommands |= {f"{group} {name}": sub for name, sub in subcommands.pop(group).commands.items()}
    flags_by_command = {
        name: {flag for param in sub.params for flag in param.opts} - {"--help"} for name, sub in subcommands.items()
    }
    assert flags_by_command == FLAGS
    for name, flags in FLAGS.items():
        for flag in flags - {"-m"}:
            assert f"`{flag}`" in DOCS["settings.md"], f"{flag} of {name} is not in docs/settings.md"


def test_every_loss_is_documented() -> None:
    for name, loss in LOSSES.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*", DOCS["losses.md"], re.MULTILINE)
        defaults = {key: value for key, value in loss.config.items() if key not in (DUAL_CLIP, ROLLOUT_MAX)}
        assert all(f"`{key}`: {value:g}" in row for key, value in defaults.items()), f"the defaults of {name}"


def test_the_architecture_names_every_package() -> None:
    for path in sorted((ROOT / "src" / "tinsmith").iterdir()):
        if path.name.startswith("__"):
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert f"\n- `{name}`: " in DOCS["architecture.md"], f"{name} is not in docs/architecture.md"


def test_the_glossary_is_short_and_sorted() -> None:
    terms = re.findall(r"^- \*\*(.+?)\*\*: ", DOCS["glossary.md"], re.MULTILINE)
    assert terms == sorted(terms, key=str.casefold) and len(set(terms)) == len(terms)
    assert 20 <= len(terms) <= 40


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80


def test_the_documents_stay_short() -> None:
    # What benchmarks write, a page and a table, is as long as what they measured.
    written = {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/benchmarks/gpu.md"}
    table = re.compile(r"<!-- targets.py writes .*?<!-- to here -->", re.DOTALL)
    # Bars of tables are no words: a table of limits must not cost more than the same limits in a paragraph.
    words = [re.findall(r"\S*\w\S*", table.sub("", path.read_text())) for path in written]
    assert sum(map(len, words)) <= 43_000


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"
