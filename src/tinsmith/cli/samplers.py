"""`tinsmith samplers`: list and locate dedicated samplers, and change their state, in the database of the servers.

A drained sampler finishes the samples that it has and is given no new ones; it keeps its memory, its lease and its
versions. A sleeping one also has its inference server (vLLM, SGLang) release the device. Both last until the sampler is
woken or its process ends. The commands work from any machine that reaches the database, whether a server runs or not;
servers offer the same over HTTP, below /api/v1/operator/samplers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tinsmith.cli.database import DataDir, server_database
from tinsmith.cli.remote import AsJson, output, print_json, print_rows, print_table
from tinsmith.runtime.sizes import format_bytes

app = typer.Typer(help="List, locate, drain and wake dedicated samplers, or have them sleep.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="SAMPLER", help="Its name, as `tinsmith samplers list` shows it.")]


@app.command("list")
def list_samplers(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List samplers with their state, process and samples."""
    from tinsmith.cluster.executors import DedicatedSamplers

    with server_database(data_dir) as database:
        samplers = DedicatedSamplers(database).all()
    names = "sampler", "base_model", "state", "holder", "pid", "samples"
    columns = "sampler", "base model", "state", "holder", "process", "samples"
    print_rows(as_json, samplers, columns, lambda row: (row[name] for name in names))


@app.command()
def show(name: Name, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Show where a sampler is, its engine, and the versions that it holds."""
    from tinsmith.cluster.executors import DedicatedSamplers

    with server_database(data_dir) as database:
        sampler = DedicatedSamplers(database).find(name)
    if as_json:
        print_json(sampler)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in sampler.items():
        table.add_row(key.replace("_", " "), escape(_cell(value)))
    print_table(table)


def _cell(value: object) -> str:
    """A property as text; versions have a line each."""
    if isinstance(value, list):
        return "\n".join(f"{version['version']}: {format_bytes(version['bytes'])}" for version in value)
    return "" if value is None else str(value)


@app.command()
def drain(name: Name, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Give a sampler no new samples; it finishes its own."""
    _change(name, "drain", as_json=as_json, data_dir=data_dir)


@app.command()
def sleep(name: Name, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Have a sampler's vLLM or SGLang release its device."""
    _change(name, "sleep", as_json=as_json, data_dir=data_dir)


@app.command()
def wake(name: Name, as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """Give a drained or sleeping sampler samples again."""
    _change(name, "wake", as_json=as_json, data_dir=data_dir)


def _change(name: str, action: str, *, as_json: bool, data_dir: Path | None) -> None:
    from tinsmith.cluster.executors import DedicatedSamplers

    with server_database(data_dir) as database:
        row = DedicatedSamplers(database).change(name, action)
    if as_json:
        typer.echo(json.dumps(row))
    else:
        output.print(f"sampler {name} is {row['state']}; samples that it has: {row['samples']}", highlight=False)
