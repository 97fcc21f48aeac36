"""Hostile files: adapters, optimizer states and manifests that are damaged or malicious.

Loading them raises an error that names the file. No code is run, no large memory is allocated, and
no model is partially loaded.
"""

from __future__ import annotations

import json
import pickle
import resource
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import tiny_models
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.model import BaseModel
from tinsmith.errors import CorruptFilesError, SettingsError, UserError
from tinsmith.storage.directories import MANIFEST, Directories
from tinsmith.types import LoraSpec, ModelShape

pytestmark = pytest.mark.smoke

SPEC = LoraSpec(4, seed=1)
WEIGHTS, CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
MAX_MEMORY_KIB = 256 * 1024  # that a refusal may allocate; the files claim far more


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return tiny_models.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def backend(shape: ModelShape) -> TorchBackend:
    return TorchBackend(shape, device="cpu")


@pytest.fixture
def adapter_directory(backend: TorchBackend, tmp_path: Path) -> Iterator[Path]:
    backend.create_model("m", SPEC)
    backend.save("m", tmp_path, optimizer=True)
    yield tmp_path
    backend.unload_model("m")


def tensors_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> bytes:
    return json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}).encode()


HUGE = 2**60
LYING = {
    "nothing": b"",
    "a header longer than the file": tensors_file(b"{}", length=HUGE),
    "a header of the largest length": tensors_file(b"{}", length=2**64 - 1),
    "a tensor longer than the file": tensors_file(entry("F32", [2**40], 0, 2**42)),
    "a size that overflows": tensors_file(entry("F32", [2**32, 2**32, 2**32], 0, 4), bytes(4)),
    "a size that is not its offsets'": tensors_file(entry("F32", [2**20], 0, 4), bytes(4)),
    "a negative size": tensors_file(entry("F32", [-1], 0, 4), bytes(4)),
    "offsets that are not in order": tensors_file(entry("F32", [1], 4, 0), bytes(4)),
    "a gap": tensors_file(entry("F32", [1], 4, 8), bytes(8)),
    "bytes that belong to nothing": tensors_file(entry("F32", [1], 0, 4), bytes(1 << 20)),
    "a number format that there is not": tensors_file(entry("X9", [1], 0, 4), bytes(4)),
    "a header that is deep": tensors_file(b"[" * 100_000),
    "a header that is no text": tensors_file(b"\xff" * 100),
    "a pickle": pickle.dumps({"x": 1}),
    "a zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("lie", LYING)
def test_a_file_of_tensors_that_lies_is_refused_by_name(
    backend: TorchBackend, adapter_directory: Path, lie: str, file: str
) -> None:
    (adapter_directory / file).write_bytes(LYING[lie])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=file):
        backend.load("new", SPEC, adapter_directory, optimizer=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MEMORY_KIB
    assert not backend.has_model("new")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "",
        "[]",
        "null",
        "\ud800",
        *(f'{{"peft_type": "LORA", "r": {r}, "lora_alpha": {alpha}}}' for r, alpha in (
            (10**30, 1), ("true", 1), (-1, 1), (4.0, 1), ("null", 1), ("[4]", 1),
            (4, "NaN"), (4, "Infinity"), (4, -1), (4, 0), (4, "true"), (4, 10**400), (4, "{}"),
        )),
    ],
    ids=lambda text: text[:60],
)  # fmt: skip
def test_an_adapters_description_that_lies_is_refused_by_name(
    backend: TorchBackend, adapter_directory: Path, text: str
) -> None:
    (adapter_directory / CONFIG).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"adapter_config\.json|adapter_model\.safetensors"):
        backend.load("new", SPEC, adapter_directory, optimizer=False)
    assert not backend.has_model("new")


def smaller(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({next(key for key in tensors if name in key): torch.ones(1)})


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (OPTIMIZER, lambda tensors: tensors.pop("step")),
        (OPTIMIZER, lambda tensors: tensors.update(step=torch.zeros(3))),
        (OPTIMIZER, smaller("lora_A")),
        (OPTIMIZER, smaller("lora_B")),
        (WEIGHTS, smaller("lora_A")),
        (WEIGHTS, lambda tensors: tensors.update({key: value.int() for key, value in tensors.items()})),
        (WEIGHTS, lambda tensors: tensors.update({key: value.cfloat() for key, value in tensors.items()})),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    backend: TorchBackend, adapter_directory: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(adapter_directory / file).items()}
    change(tensors)
    save_file(tensors, adapter_directory / file)
    with pytest.raises(UserError, match=file):
        backend.load("new", SPEC, adapter_directory, optimizer=True)
    assert not backend.has_model("new")


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_base_model_of_pickles_is_refused_unread(shape: ModelShape, tmp_path: Path) -> None:
    for file in Path(shape.path).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(SettingsError, match=r"no \.safetensors file"):
        BaseModel.load(ModelShape("x", str(tmp_path), shape.vocab_size, shape.max_context_length, shape.arch))
    assert not (tmp_path / "exploded").exists()


def test_code_that_comes_with_a_base_model_is_not_run(shape: ModelShape, tmp_path: Path) -> None:
    for file in Path(shape.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')")
    with pytest.raises(SettingsError, match="trust_remote_code"):
        BaseModel.load(ModelShape("x", str(tmp_path), shape.vocab_size, shape.max_context_length, shape.arch))
    assert not (tmp_path / "exploded").exists()
    assert not any("mine" in name.split(".") for name in sys.modules)


# Directories.


@pytest.fixture
def directory_with_manifest(tmp_path: Path) -> tuple[Directories, str]:
    def fill(path: Path) -> None:
        (path / "a").write_bytes(b"content")

    directories = Directories(tmp_path / "sealed")
    return directories, directories.write(fill)[0]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ".", "..", "", "a/b"])
def test_a_manifest_that_names_files_elsewhere_is_damage(
    directory_with_manifest: tuple[Directories, str], name: str
) -> None:
    directories, directory = directory_with_manifest
    (directories.path(directory).parent / "secret").write_bytes(b"content")
    manifest = directories.path(directory) / MANIFEST
    contents = json.loads(manifest.read_text())
    contents["files"] = {name: contents["files"]["a"]}
    manifest.write_text(json.dumps(contents))
    for use in (directories.files, directories.check_sizes, directories.check, directories.copy):
        with pytest.raises(CorruptFilesError):
            use(directory)


def test_a_link_in_place_of_a_file_is_damage(directory_with_manifest: tuple[Directories, str], tmp_path: Path) -> None:
    directories, directory = directory_with_manifest
    (tmp_path / "secret").write_bytes(b"content")  # of the same size and digest
    (directories.path(directory) / "a").unlink()
    (directories.path(directory) / "a").symlink_to(tmp_path / "secret")
    for use in (directories.check_sizes, directories.check, directories.copy):
        with pytest.raises(CorruptFilesError, match="a is missing"):
            use(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {}}}',
                                  '{"files": {"a": {"bytes": "x"}}}', "[" * 100_000, "\udcff"])  # fmt: skip
def test_a_manifest_that_is_none_is_damage(directory_with_manifest: tuple[Directories, str], text: str) -> None:
    directories, directory = directory_with_manifest
    (directories.path(directory) / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptFilesError):
        directories.check(directory)
