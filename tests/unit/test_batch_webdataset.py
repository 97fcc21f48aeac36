"""WebDataset shards: each row is one sample for the library too, no name leads out of a directory, none is lost."""

from __future__ import annotations

import io
import re
import string
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.properties import examples
from tinsmith import batch
from tinsmith.batch.formats.webdataset import WebdatasetWriter
from tinsmith.batch.types import PartInfo, RowRange
from tinsmith.errors import UserError

Rows = list[dict[str, Any]]
LIBRARY_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
LIBRARY_SKIPS = re.compile(r"__[^/]*__($|/)")


def library_samples(shards: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The samples by the rule of the `webdataset` library 1.0: the key of a member is its path up to the first dot of
    the file's name; members that follow one another with one key are a sample; a repeated member is an error."""
    for shard in shards:
        sample: dict[str, Any] = {}
        with tarfile.open(shard) as archive:
            for member in archive:
                if not member.isreg() or LIBRARY_SKIPS.match(member.name):
                    continue
                match = LIBRARY_NAME.match(member.name)
                if match is None:
                    continue
                key, ending = match[1], match[2].lower()
                if sample and sample["__key__"] != key:
                    yield sample
                    sample = {}
                sample.setdefault("__key__", key)
                assert ending not in sample, f"{member.name}: duplicate file name in tar file"
                data = archive.extractfile(member)
                assert data is not None
                sample[ending] = data.read()
        if sample:
            yield sample


def write_parts(writer: WebdatasetWriter, rows: Sequence[Any], directory: str, batch_size: int) -> list[PartInfo]:
    return [
        writer.write_part(page := rows[start : start + batch_size], RowRange(start, start + len(page) - 1), directory)
        for start in range(0, len(rows), batch_size)
    ]


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def read_all(path: str) -> Rows:
    reader = batch.WebdatasetReader(path)
    return reader.download_batch(0, len(reader) - 1, "") if len(reader) else []


NAMES = st.one_of(
    st.text(string.ascii_letters + string.digits + "._-/ \u00e4~", max_size=6),
    st.sampled_from(["a", "a/b", "a.b/c", "00000001", "__a__", "__m__/x", "..", "../a", "/a", "a//b", "x" * 200]),
    st.none(),
    st.integers(-1, 3),
)
ROWS = st.lists(
    st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {},
            optional={
                "__key__": NAMES,
                "txt": st.text(max_size=3),
                "cls": st.integers(-9, 9),
                "seg.bin": st.binary(max_size=3),
                "meta.json": st.none() | st.lists(st.integers(0, 3), max_size=2),
                "__b__": st.binary(max_size=1),
            },
        ),
    ),
    max_size=8,
)


@examples(150)
@given(ROWS, st.integers(1, 4), st.sampled_from(["__key__", None]))
def test_rows_are_written_and_read_one_for_one_or_refused(rows: list[Any], batch_size: int, key: str | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        writer = WebdatasetWriter(f"{directory}/out", key=key)
        checked: list[Any] = []
        for row in rows:
            try:
                checked.append(row if row is None or writer.check(row) is None else None)
            except (ValueError, TypeError):
                checked.append(None)  # the row has failed
        expected = [
            {"__key__": f"{index:08d}", **{name: row[name] for name in row if name != "__key__" or key is not None}}
            for index, row in enumerate(checked)
            if row is not None
        ]
        keys = [row["__key__"] for row in expected]
        try:
            parts = write_parts(writer, checked, f"{directory}/parts", batch_size)
            info = writer.publish(parts, f"{directory}/staging", "error")
        except (ValueError, UserError) as refusal:
            assert len(set(keys)) < len(keys) and "key is unique" in str(refusal)
            assert not list(Path(directory).glob("out/*.tar"))
            return
        assert len(set(keys)) == len(keys) and info.rows == len(expected)
        assert read_all(f"{directory}/out/") == expected
        shards = sorted(Path(directory).glob("out/*.tar"))
        samples = list(library_samples(shards))
        assert [(sample["__key__"], set(sample)) for sample in samples] == [
            (row["__key__"], {*row, "__key__"}) for row in expected
        ]
        root = Path(directory) / "extracted"
        for shard in shards:
            with tarfile.open(shard) as archive:
                assert all((root / name).resolve().is_relative_to(root) for name in archive.getnames())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"__key__": None, "txt": ""}, "__key__ is None, a NoneType; a key is text"),
        ({"__key__": 7, "txt": ""}, "__key__ is 7, a int; a key is text: use str"),
        ({"__key__": "a.b", "txt": ""}, "__key__ is 'a.b'; a key ends at its first dot"),
        ({"__key__": ".a", "txt": ""}, "__key__ is '.a'; a key ends at its first dot"),
        ({"__key__": "../a", "txt": ""}, "'../a'; a key is a relative name"),
        ({"__key__": "/a", "txt": ""}, "'/a'; a key is a relative name"),
        ({"__key__": "a/./b", "txt": ""}, "'a/./b'; a key is a relative name"),
        ({"__key__": "", "txt": ""}, "''; a key is a relative name"),
        ({"__key__": "a\nb", "txt": ""}, "control characters"),
        ({"__key__": "a\\b", "txt": ""}, "backslashes"),
        ({"__key__": "__m__/a", "txt": ""}, "skip; rename the key or the column"),
        ({"__key__": "a"}, "the row 'a' has no column beside its key"),
        ({}, "has no column beside its key"),
        ({"../txt": b""}, "'../txt' cannot be the ending"),
        ({"": b""}, "'' cannot be the ending"),
        ({7: b""}, "7 cannot be the ending"),
        ({"__url__": b""}, "'__url__' has a name that readers"),
        ({"a.bin": b"", "A.bin": b""}, "differ in case only"),
    ],
)
def test_a_row_that_cannot_be_a_sample_fails_with_its_value(row: dict[Any, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refusal:
        WebdatasetWriter("out").check(row)
    assert message in str(refusal.value)


def test_equal_keys_are_refused_by_their_rows_and_can_be_numbered(tmp_path: Path) -> None:
    rows: Rows = [{"__key__": name, "txt": str(index)} for index, name in enumerate("abcdb")]
    writer = WebdatasetWriter(f"{tmp_path}/out")
    with pytest.raises(ValueError, match="rows 1 and 4 have the key 'b', and a sample's key is unique"):
        write_parts(writer, rows, f"{tmp_path}/whole", 5)
    parts = write_parts(writer, rows, f"{tmp_path}/parts", 2)
    with pytest.raises(UserError, match=r"the key 'b', in rows 0 to 1 and rows 4 to 4.*key=None") as refusal:
        writer.publish(parts, f"{tmp_path}/staging", "error")
    assert "Nothing is lost" in str(refusal.value) and not (tmp_path / "out").exists()
    numbered = WebdatasetWriter(f"{tmp_path}/out", key=None)
    again = [row for part in parts for row in writer.read_part(part)]
    assert again == rows
    numbered.publish(write_parts(numbered, again, f"{tmp_path}/again", 2), f"{tmp_path}/again", "error")
    assert [row["__key__"] for row in read_all(f"{tmp_path}/out/")] == [f"{index:08d}" for index in range(5)]


def test_a_key_like_a_number_does_not_meet_the_number_of_another_row(tmp_path: Path) -> None:
    rows: Rows = [{"__key__": "00000003", "txt": "a"}, {"txt": "b"}, {"txt": "c"}, {"txt": "d"}]
    writer = WebdatasetWriter(f"{tmp_path}/out")
    parts = write_parts(writer, rows, f"{tmp_path}/parts", 2)
    with pytest.raises(UserError, match="two rows have the key '00000003'"):
        writer.publish(parts, f"{tmp_path}/staging", "error")


def test_a_column_of_the_users_can_be_the_key(tmp_path: Path) -> None:
    writer = WebdatasetWriter(f"{tmp_path}/out", key="id")
    parts = write_parts(writer, [{"id": "x/1", "txt": "a"}, {"id": "x/2", "txt": "b"}], f"{tmp_path}/parts", 1)
    writer.publish(parts, f"{tmp_path}/staging", "error")
    assert read_all(f"{tmp_path}/out/") == [{"__key__": "x/1", "txt": "a"}, {"__key__": "x/2", "txt": "b"}]
    with pytest.raises(KeyError, match="no column 'id' for its key"):
        writer.check({"txt": "a"})


def test_keys_that_several_shards_or_samples_have_are_separate_rows(tmp_path: Path) -> None:
    write_tar(tmp_path / "in/a.tar", [("x.txt", b"1"), ("y.txt", b"2"), ("x.txt", b"3")])
    write_tar(tmp_path / "in/b.tar", [("./x.txt", b"4"), ("x.cls", b"5"), ("README", b""), ("__meta__/z.txt", b"")])
    assert read_all(f"{tmp_path}/in/") == [
        {"__key__": "x", "txt": "1"},
        {"__key__": "y", "txt": "2"},
        {"__key__": "x", "txt": "3"},
        {"__key__": "x", "txt": "4", "cls": 5},
    ]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (["../x.txt"], r"in.tar has the member '../x.txt', whose name leads out of the directory"),
        (["a/../../x.txt"], "leads out of the directory"),
        (["/etc/x.txt"], "leads out of the directory"),
        (["x.txt", "x.txt"], r"in.tar has the member 'x.txt' twice in one sample"),
        (["x.txt", "./x.txt"], r"member './x.txt' twice"),
        (["x.__key__"], r"has the member 'x.__key__', but __key__ is its key"),
    ],
)
def test_shards_whose_names_lose_rows_or_leave_their_directory_are_refused(
    members: list[str], message: str, tmp_path: Path
) -> None:
    write_tar(tmp_path / "in.tar", [(name, b"") for name in members])
    with pytest.raises(UserError, match=message):
        len(batch.WebdatasetReader(f"{tmp_path}/in.tar"))


def test_what_is_no_tar_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.tar.gz").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(UserError, match=r"in.tar.gz is not a tar file.*Unpack"):
        len(batch.WebdatasetReader(f"{tmp_path}/in.tar.gz"))
    with pytest.raises(FileNotFoundError, match="no file matches"):
        len(batch.WebdatasetReader(f"{tmp_path}/none/"))
