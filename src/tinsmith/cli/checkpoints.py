"""`tinsmith checkpoints`: list, download, upload, import and merge checkpoints.

Merging local directories needs no server. Exit status: 0 for success, 2 if the command was refused.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tinsmith.cli.remote import AsJson, exit_on_errors, format_time, notes, print_result, print_rows, server, size
from tinsmith.errors import UserError

CONVERTER = "convert_hf_to_gguf.py"

app = typer.Typer(help="List, download, upload, import and merge checkpoints.", no_args_is_help=True)

Base = Annotated[str, typer.Option("--base", help="The base model. Default: the adapter's.")]
Name = Annotated[str, typer.Option(help="The new checkpoint's name.")]
Ttl = Annotated[int | None, typer.Option(metavar="SECONDS", help="When it expires. Default: never.")]
AdapterDirectory = Annotated[
    Path, typer.Argument(help="A directory with an adapter in PEFT's format, or a .tar.gz of its files.")
]


@app.command("list")
def list_checkpoints(
    run: Annotated[str, typer.Option(help="Only this training run's checkpoints.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List checkpoints, newest first."""
    with exit_on_errors(), server() as client:
        path = f"training_runs/{quote(run, safe='')}/checkpoints" if run else "checkpoints"
        rows = client.get(path, {} if run else {"limit": limit})["checkpoints"][:limit]

    def row(checkpoint: dict[str, Any]) -> tuple[str, ...]:
        expires = format_time(checkpoint["expires_at"]) or "never"
        cells = (size(checkpoint["size_bytes"]), format_time(checkpoint["time"]), expires)
        return checkpoint["tinker_path"], checkpoint["checkpoint_type"], *cells

    print_rows(as_json, rows, ("checkpoint", "kind", "size", "created", "expires"), row)


@app.command()
def pull(
    path: Annotated[str, typer.Argument(metavar="TINKER_PATH", help="tinker://RUN/KIND/NAME.")],
    directory: Annotated[Path, typer.Argument(help="A new directory for its files, or a new .tar.gz.")],
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint as a directory for PEFT, vLLM and SGLang."""
    from tinsmith.exchange import transfer

    with exit_on_errors(), server() as client, _bar("pulling", as_json) as progress:
        if directory.name.endswith(transfer.ARCHIVES):
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".pull-") as scratch:
                files = client.pull(path, Path(scratch) / "files", progress)
                transfer.pack(Path(scratch) / "files", directory)
        else:
            files = client.pull(path, directory, progress)
    size_bytes = sum(files.values())
    print_result(
        as_json,
        {"tinker_path": path, "directory": str(directory), "files": files, "size_bytes": size_bytes},
        f"{path}: {len(files)} files, {size(size_bytes)} in {directory}",
    )


@app.command()
def push(
    directory: AdapterDirectory, base: Base = "", name: Name = "pushed", ttl: Ttl = None, as_json: AsJson = False
) -> None:
    """Upload an adapter as a training checkpoint, with its optimizer state if present."""
    from tinsmith.exchange.transfer import adapter_directory

    with (
        exit_on_errors(),
        tempfile.TemporaryDirectory() as scratch,
        adapter_directory(directory, Path(scratch)) as adapter,
    ):
        _push(adapter, base, name, ttl, as_json)


@app.command("import")
def import_adapter(
    directory: AdapterDirectory,
    base: Base = "",
    name: Name = "imported",
    ttl: Ttl = None,
    base_directory: Annotated[
        str, typer.Option(metavar="DIR_OR_ID", help="The base model's files, to compare copies with.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Rewrite any LoRA adapter in PEFT's format (alpha, rsLoRA, ranks by module, 16 bits) and upload it."""
    from tinsmith.exchange import merging
    from tinsmith.exchange.transfer import adapter_directory
    from tinsmith.wire import adapter_files

    with (
        exit_on_errors(),
        tempfile.TemporaryDirectory() as scratch,
        adapter_directory(directory, Path(scratch)) as adapter,
    ):
        rewritten = Path(scratch) / "adapter"
        base_name = base_directory or base or adapter_files.read_adapter(adapter).base_name
        rewritten_adapter = merging.rewrite(adapter, rewritten, lambda: _base_directory(base_name))
        if not as_json:
            notes.print(f"rewrote {len(rewritten_adapter.linears)} linear layers with rank {rewritten_adapter.rank}")
        _push(rewritten, base, name, ttl, as_json)


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(help="A directory with an adapter, or its tinker:// path.")],
    directory: Annotated[Path, typer.Argument(help="A new directory for the model.")],
    base: Annotated[
        str, typer.Option("--base", metavar="DIR_OR_ID", help="The base model. Default: the adapter's.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto (the base's), float32, bfloat16 or float16.")] = "auto",
    max_shard_gb: Annotated[float, typer.Option(help="Largest size of a file of weights.", min=0.001)] = 5.0,
    gguf: Annotated[Path | None, typer.Option(help="Also write this GGUF file, for llama.cpp.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Sources of llama.cpp, for --gguf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base, writing an ordinary Hugging Face model."""
    from tinsmith.exchange import merging
    from tinsmith.wire import adapter_files

    with exit_on_errors(), tempfile.TemporaryDirectory() as scratch:
        converter = _converter(gguf, llama_cpp)
        source = Path(adapter)
        if adapter.startswith("tinker://"):
            source = Path(scratch) / "adapter"
            with server() as client, _bar("pulling", as_json) as progress:
                client.pull(adapter, source, progress)
        base_directory = _base_directory(base or adapter_files.read_adapter(source).base_name)
        with _bar("merging", as_json, "tensors") as progress:
            shard_bytes = round(max_shard_gb * 1e9)
            merged = merging.merge(
                base_directory, source, directory, dtype=dtype, shard_bytes=shard_bytes, progress=progress
            )
        if converter and gguf:
            _convert(converter, directory, gguf)
    print_result(
        as_json,
        {**asdict(merged), "path": str(merged.path), "gguf": None if gguf is None else str(gguf)},
        f"merged {merged.linears} linear layers: {size(merged.size_bytes)} of {merged.dtype} in {directory}",
    )


def _push(directory: Path, base: str, name: str, ttl: int | None, as_json: bool) -> None:
    from tinsmith.wire import adapter_files

    base_name = adapter_files.read_adapter(directory, plain=True).base_name  # before anything is sent
    base = base or base_name
    if not base:
        raise UserError(f"{adapter_files.CONFIG_FILE} names no base model; name the served one: --base NAME")
    fields = {"base_model": base, "name": name, **({} if ttl is None else {"ttl_seconds": str(ttl)})}
    with server() as client, _bar("pushing", as_json) as progress:
        answer = client.push(directory, fields, progress)
    print_result(as_json, answer, f"{answer['tinker_path']}: {size(answer['size_bytes'])} on base {base}")


def _base_directory(base: str) -> Path:
    from tinsmith.base_models import resolve

    if not base:
        raise UserError("the adapter names no base model; give its directory or hub id: --base DIR_OR_ID")
    (shape,) = resolve([base])
    return Path(shape.path)


def _converter(gguf: Path | None, llama_cpp: Path | None) -> Path | None:
    """Find llama.cpp's conversion script. Raises UserError before anything is merged."""
    if gguf is None:
        return None
    if gguf.exists():
        raise UserError(f"{gguf} exists already; choose another file, or delete it")
    script = None if llama_cpp is None else llama_cpp / CONVERTER
    if script is None or not script.is_file():
        raise UserError(
            f"--gguf needs llama.cpp's {CONVERTER}, which no package installs: unpack llama.cpp's sources, "
            f"`pip install gguf`, and pass --llama-cpp DIRECTORY (the directory of {CONVERTER})"
        )
    return script


def _convert(script: Path, model: Path, target: Path) -> None:
    command = [sys.executable, str(script), str(model), "--outfile", str(target)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if completed.returncode != 0 or not target.is_file():
        raise UserError(
            f"{script.name} failed ({completed.returncode}); {model} is complete. "
            f"Its output: {completed.stdout[-2000:]}"
        )


@contextmanager
def _bar(label: str, quiet: bool, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if it is a terminal."""
    columns = (TextColumn(unit),) if unit else (DownloadColumn(), TransferSpeedColumn())
    bar = Progress(
        TextColumn(label), BarColumn(), *columns, console=notes, disable=quiet or not notes.is_terminal, transient=True
    )
    task = bar.add_task(label, total=None)
    with bar:
        yield lambda completed, total: bar.update(task, completed=completed, total=total or None)
