"""`tinsmith checkpoints`: download a checkpoint, upload an adapter, and merge an adapter into its base.

The server is TINKER_BASE_URL and the key TINKER_API_KEY, as for the SDK; `merge` of local directories needs none. With
`--json`, standard output holds JSON alone. Exit status: 0 for success, 2 if the command was refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tinsmith.errors import TinsmithError, UserError

if TYPE_CHECKING:
    from tinsmith.exchange.transfer import TinkerServer

REFUSED = 2
CONVERTER = "convert_hf_to_gguf.py"

app = typer.Typer(help="Checkpoints: fetch, send, import, merge.", no_args_is_help=True)
output = Console(soft_wrap=True, highlight=False)
notes = Console(stderr=True, soft_wrap=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Base = Annotated[str, typer.Option("--base", help="The base model. Default: the adapter's.")]
Name = Annotated[str, typer.Option(help="The new checkpoint's name.")]
Ttl = Annotated[int | None, typer.Option(metavar="SECONDS", help="When it expires. Default: never.")]
AdapterDirectory = Annotated[Path, typer.Argument(help="A directory with an adapter in PEFT's format.")]


@app.command()
def pull(
    path: Annotated[str, typer.Argument(metavar="TINKER_PATH", help="tinker://RUN/KIND/NAME.")],
    directory: Annotated[Path, typer.Argument(help="A new directory for its files.")],
    as_json: AsJson = False,
) -> None:
    """Download a checkpoint as a directory for PEFT, vLLM and SGLang."""
    with _refusals(), _server() as server, _bar("pulling", as_json) as progress:
        pulled = server.pull(path, directory, progress)
    size_bytes = sum(pulled.files.values())
    _say(
        as_json,
        {"tinker_path": path, "directory": str(directory), "files": dict(pulled.files), "size_bytes": size_bytes},
        f"{path}: {len(pulled.files)} files, {size_bytes} bytes in {directory}",
    )


@app.command()
def push(
    directory: AdapterDirectory, base: Base = "", name: Name = "pushed", ttl: Ttl = None, as_json: AsJson = False
) -> None:
    """Upload an adapter as a training checkpoint, with optimizer state if there is some."""
    with _refusals():
        _push(directory, base, name, ttl, as_json)


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
    """Rewrite any LoRA adapter of PEFT's (alpha, rsLoRA, ranks by module, 16 bits) and upload it."""
    from tinsmith.exchange import adapters, merging

    with _refusals(), tempfile.TemporaryDirectory() as scratch:
        rewritten = Path(scratch) / "adapter"
        named = base_directory or base or adapters.read(directory).base_name
        facts = merging.rewrite(directory, rewritten, lambda: _base_directory(named))
        if not as_json:
            notes.print(f"{len(facts.linears)} linears of rank {facts.rank}, rewritten")
        _push(rewritten, base, name, ttl, as_json)


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(help="A directory with an adapter, or its tinker:// path.")],
    directory: Annotated[Path, typer.Argument(help="A new directory for the model.")],
    base: Annotated[
        str,
        typer.Option("--base", metavar="DIR_OR_ID", help="The base model. Default: the adapter's."),
    ] = "",
    dtype: Annotated[str, typer.Option(help="auto (the base's), float32, bfloat16 or float16.")] = "auto",
    max_shard_gb: Annotated[float, typer.Option(help="Size of a file of weights.", min=0.001)] = 5.0,
    gguf: Annotated[Path | None, typer.Option(help="Also write this GGUF file, for llama.cpp.")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="Sources of llama.cpp, for --gguf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Merge an adapter into its base, which makes an ordinary Hugging Face model."""
    from tinsmith.exchange import adapters, merging

    with _refusals(), tempfile.TemporaryDirectory() as scratch:
        converter = _converter(gguf, llama_cpp)
        source = Path(adapter)
        if adapter.startswith("tinker://"):
            source = Path(scratch) / "adapter"
            with _server() as server, _bar("pulling", as_json) as progress:
                server.pull(adapter, source, progress)
        base_directory = _base_directory(base or adapters.read(source).base_name)
        with _bar("merging", as_json, "tensors") as progress:
            shard_bytes = round(max_shard_gb * 1e9)
            merged = merging.merge(
                base_directory, source, directory, dtype=dtype, shard_bytes=shard_bytes, progress=progress
            )
        if converter and gguf:
            _convert(converter, directory, gguf)
    _say(
        as_json,
        {**asdict(merged), "path": str(merged.path), "gguf": None if gguf is None else str(gguf)},
        f"{merged.linears} linears merged: {merged.size_bytes} bytes of {merged.dtype} in {directory}",
    )


def _push(directory: Path, base: str, name: str, ttl: int | None, as_json: bool) -> None:
    from tinsmith.exchange import adapters

    named = adapters.read(directory, plain=True).base_name  # before anything is sent
    base = base or named
    if not base:
        raise UserError(f"{adapters.CONFIG_FILE} names no base model; say which one is served: --base NAME")
    fields = {"base_model": base, "name": name, **({} if ttl is None else {"ttl_seconds": str(ttl)})}
    with _server() as server, _bar("pushing", as_json) as progress:
        answer = server.push(directory, fields, progress)
    _say(as_json, answer, f"{answer['tinker_path']}: {answer['size_bytes']} bytes on base {base}")


def _base_directory(base: str) -> Path:
    from tinsmith.base_models import resolve

    if not base:
        raise UserError("the adapter names no base model; say which directory or hub id: --base DIR_OR_ID")
    (shape,) = resolve([base])
    return Path(shape.path)


def _converter(gguf: Path | None, llama_cpp: Path | None) -> Path | None:
    """llama.cpp's own script. Raises UserError: before anything is merged."""
    if gguf is None:
        return None
    if gguf.exists():
        raise UserError(f"{gguf} exists already; choose another file, or delete it")
    script = None if llama_cpp is None else llama_cpp / CONVERTER
    if script is None or not script.is_file():
        raise UserError(
            f"--gguf needs llama.cpp's {CONVERTER}, which no package installs: unpack llama.cpp's sources, "
            f"`pip install gguf`, and say --llama-cpp DIRECTORY (the one that holds {CONVERTER})"
        )
    return script


def _convert(script: Path, model: Path, target: Path) -> None:
    command = [sys.executable, str(script), str(model), "--outfile", str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0 or not target.is_file():
        raise UserError(f"{script.name} failed ({done.returncode}); {model} is whole. It said: {done.stdout[-2000:]}")


@contextmanager
def _server() -> Iterator[TinkerServer]:
    from tinsmith import settings
    from tinsmith.exchange.transfer import TinkerServer

    server = TinkerServer(*settings.client_address())
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _refusals() -> Iterator[None]:
    """An expected error ends the command with one line and status 2."""
    try:
        yield
    except (TinsmithError, OSError) as error:
        notes.print(f"[red]error:[/] {escape(str(error))}")
        raise typer.Exit(REFUSED) from None


@contextmanager
def _bar(what: str, quiet: bool, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    columns = (TextColumn(unit),) if unit else (DownloadColumn(), TransferSpeedColumn())
    bar = Progress(
        TextColumn(what), BarColumn(), *columns, console=notes, disable=quiet or not notes.is_terminal, transient=True
    )
    task = bar.add_task(what, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _say(as_json: bool, value: object, line: str) -> None:
    if as_json:
        typer.echo(json.dumps(value, indent=1))
    else:
        output.print(escape(line))
