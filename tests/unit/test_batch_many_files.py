"""Inputs of thousands of files and outputs of thousands of parts, in a process that may open few files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FILES = 2000
MAX_OPEN = 48
PRELUDE = f"""
import gzip, io, json, os, resource, sys, tarfile
import pyarrow, pyarrow.parquet
from PIL import Image
from tinsmith import batch
from tinsmith.batch.types import RowRange
from tinsmith.storage import stores
root, FILES = sys.argv[1], {FILES}
stores.fsync = lambda path: None  # the disk is not what is tested
os.fsync = lambda descriptor: None
resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_OPEN}, {MAX_OPEN}))
"""

READ = """
def parquet(index):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": [index]}), sink)
    return sink.getvalue()
def tar(index):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        member = tarfile.TarInfo("a.cls")
        member.size = len(str(index))
        archive.addfile(member, io.BytesIO(str(index).encode()))
    return sink.getvalue()
def image(index):
    sink = io.BytesIO()
    Image.new("L", (1, 1), index % 256).save(sink, "PNG")
    return sink.getvalue()
kind = sys.argv[2]
make, reader = {
    "jsonl": (lambda n: b'{"n":%d}' % n, batch.JsonReader),
    "jsonl.gz": (lambda n: gzip.compress(b'{"n":%d}' % n), batch.JsonReader),
    "csv": (lambda n: b"n\\n%d\\n" % n, batch.CsvReader),
    "txt": (lambda n: b"%d" % n, batch.TextReader),
    "parquet": (parquet, batch.ParquetReader),
    "tar": (tar, batch.WebdatasetReader),
    "png": (image, batch.ImageReader),
}[kind]
os.makedirs(root + "/in")
for n in range(FILES):
    with open(f"{root}/in/{n:05d}.{kind}", "wb") as file:
        file.write(make(n))
data = reader(root + "/in/")
assert len(data) == FILES
rows = []
for start in (*range(0, FILES, 40), 7):
    rows += data.download_batch(start, start + 39, root)
assert len(rows) == FILES + 40
if kind != "png":
    value = lambda row: int(row.get("n", row.get("text", row.get("cls"))))
    assert [value(row) for row in rows] == [*range(FILES), *range(7, 47)]
print(len(os.listdir("/proc/self/fd")))
"""

WRITE = """
kind = sys.argv[2]
path, row, count = {
    "json": ("out.jsonl", lambda n: {"n": n}, lambda: len(batch.JsonReader(root + "/out.jsonl"))),
    "csv": ("out.csv", lambda n: {"n": n}, lambda: len(batch.CsvReader(root + "/out.csv"))),
    "csv late": ("out.csv", lambda n: {"n": n, f"late{n}": 1} if n > 1990 else {"n": n},
        lambda: len(batch.CsvReader(root + "/out.csv"))),
    "parquet": ("out.parquet", lambda n: {"n": n + 0.5 * (n % 2)},
        lambda: pyarrow.parquet.read_metadata(root + "/out.parquet").num_rows),
    "parquet directory": ("out/", lambda n: {"n": n + 0.5 * (n % 2)}, lambda: len(batch.ParquetReader(root + "/out/"))),
    "huggingface": ("out/", lambda n: {"n": n}, lambda: len(batch.HuggingFaceReader(root + "/out/"))),
    "webdataset": ("out/", lambda n: {"__key__": f"k{n}", "cls": n},
        lambda: len(batch.WebdatasetReader(root + "/out/"))),
    "images": ("out/", lambda n: {"image": image}, lambda: len(batch.ImageReader(root + "/out/"))),
}[kind]
image = Image.new("L", (1, 1))
writer = batch.OutputWriter.from_dict({"format": kind.split()[0], "path": f"{root}/{path}"})
parts = [writer.write_part([row(n)], RowRange(n, n), root + "/parts") for n in range(FILES)]
assert sum(len(list(writer.read_part(part))) for part in parts) == FILES
assert writer.publish(parts, root + "/staging", "error").rows == FILES
assert count() == FILES
print(len(os.listdir("/proc/self/fd")))
"""


def mark_extended(kind: str) -> Any:  # noqa: ANN401  what pytest takes as a parameter
    return pytest.param(kind, marks=pytest.mark.extended)


def run_script(script: str, directory: Path, kind: str) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", PRELUDE + script, str(directory), kind]
    environment = {"TMPDIR": str(directory), "PATH": "/usr/bin:/bin", "HF_HOME": str(directory / "hf")}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < MAX_OPEN


@pytest.mark.parametrize("kind", ["jsonl", *map(mark_extended, ["csv", "parquet", "tar", "jsonl.gz", "txt", "png"])])
def test_two_thousand_input_files_need_few_descriptors(kind: str, tmp_path: Path) -> None:
    run_script(READ, tmp_path, kind)


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind",
    [
        "csv",
        "parquet directory",
        "webdataset",
        *map(mark_extended, ["json", "csv late", "parquet", "huggingface", "images"]),
    ],
)
def test_two_thousand_parts_need_few_descriptors(kind: str, tmp_path: Path) -> None:
    run_script(WRITE, tmp_path, kind)
