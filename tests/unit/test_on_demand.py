"""Base models on demand: which there are, how a request divides them, and what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import tiny_models
from tinsmith.base_models import Bases, nano, resolve
from tinsmith.cli.lines import describe_models
from tinsmith.engine.layouts import find_reason_for_one_device, list_layouts
from tinsmith.errors import SettingsError, UserError
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.settings import Settings
from tinsmith.settings.environment import engine_environment
from tinsmith.types import ModelShape
from tinsmith.wire.fields import validate
from tinsmith.wire.weights import ParallelismBody, read_parallelism

GIBIBYTE = 2**30


def add_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_bytes((nano.path() / "config.json").read_bytes())
    return directory


def names(bases: Bases) -> list[str]:
    return [shape.name for shape in bases]


# Which base models there are.


def test_subdirectories_with_a_config_are_base_models_one_or_two_levels_deep(tmp_path: Path) -> None:
    add_model(tmp_path / "plain")
    add_model(tmp_path / "plain" / "tower")  # a part of it
    add_model(tmp_path / "org" / "one")
    add_model(tmp_path / "org" / "deep" / "two")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    bases = resolve((), models_from=(tmp_path,))
    assert (names(bases), bases.on_demand, bases.resident) == (["org/one", "plain"], {"org/one", "plain"}, ())


def test_a_named_model_is_resident_even_if_a_directory_has_it_too(tmp_path: Path) -> None:
    directory = add_model(tmp_path / "plain")
    add_model(tmp_path / "other")
    bases = resolve((f"plain={directory}",), models_from=(tmp_path,), allow_models=(nano.MODEL_NAME,))
    assert [shape.name for shape in bases.resident] == ["plain"]
    assert bases.on_demand == {"other", nano.MODEL_NAME} and not bases.hub_ids
    assert describe_models(bases) == f"plain, other, {nano.MODEL_NAME} on demand"


def test_two_directories_with_the_same_name_are_refused(tmp_path: Path) -> None:
    for root in ("a", "b"):
        add_model(tmp_path / root / "plain")
    with pytest.raises(SettingsError, match=r"--models-from and --allow-model names \['plain'\] more than once"):
        resolve((), models_from=(tmp_path / "a", tmp_path / "b"))


def test_many_models_on_demand_are_announced_by_their_number() -> None:
    shapes = tuple(ModelShape(str(number), "/", 50, 16, "Tiny") for number in range(9))
    assert describe_models(Bases(shapes, frozenset(map(str, range(9))))) == "9 base models on demand"


# How a request divides one.


def test_a_request_names_degrees_by_tinkerclouds_names() -> None:
    body = {"parallelism_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "num_gpus": 4}}
    degrees = read_parallelism(json.dumps(body).encode()).degrees
    assert degrees == {"tensor_parallel": 2, "pipeline_parallel": 1, "data_parallel": 2}
    assert read_parallelism(b"{}").degrees == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor_parallel_size": 3, "num_gpus": 4}, "num_gpus is 4"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3, "num_gpus": 4}, "num_gpus is 4"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"sequence_parallel": True}, "sequence_parallel"),
    ],
)
def test_degrees_that_contradict_each_other_or_are_unknown_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _ = validate(ParallelismBody, fields).degrees


def test_a_running_engine_refuses_other_degrees_with_its_own() -> None:
    running = {"data_parallel": 2, "tensor_parallel": 1}
    validate(ParallelismBody, {"num_gpus": 2}).check(running)
    with pytest.raises(UserError, match=r"asks for tensor_parallel 2, but .* runs with data_parallel 2, tensor_par"):
        validate(ParallelismBody, {"tensor_parallel_size": 2}).check(running)


def test_an_engine_sees_only_its_gpus_of_those_that_the_server_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_environment(gpus=(0, 2))["CUDA_VISIBLE_DEVICES"] == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert engine_environment(gpus=(0, 2))["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert engine_environment()["CUDA_VISIBLE_DEVICES"] == "4,5,7"


# What one needs.


def test_the_plan_has_a_layout_for_each_useful_number_of_gpus(tmp_path: Path) -> None:
    shape = tiny_models.make(tmp_path, "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    settings = Settings(data_dir=tmp_path, device="cpu")
    layouts = list_layouts(settings, shape, [80 * GIBIBYTE] * 4, {}, has_gpus=True)
    assert [layout.num_slots for layout in layouts] == sorted({layout.num_slots for layout in layouts})
    assert layouts[0].num_slots == 1 and layouts[0].degrees["data_parallel"] == 1
    sizes = [layout.num_bytes for layout in layouts]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), "more GPUs must need less of each"
    (asked,) = list_layouts(settings, shape, [80 * GIBIBYTE] * 4, {"tensor_parallel": 2}, has_gpus=True)
    assert (asked.num_slots, asked.degrees["tensor_parallel"]) == (2, 2)
    (host,) = list_layouts(settings, shape, [80 * GIBIBYTE], {"tensor_parallel": 2}, has_gpus=False)
    assert host.num_slots == 1 and host.num_bytes > GIBIBYTE, "the ranks of CPUs share the host's memory"
    with pytest.raises(SettingsError, match="cannot be divided as asked: tensor parallel 3"):
        list_layouts(settings, shape, [80 * GIBIBYTE] * 4, {"tensor_parallel": 3}, has_gpus=True)


@pytest.fixture(scope="module")
def large_shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """A model for which several devices of 4 GiB are worth their exchanges."""
    directory = tmp_path_factory.mktemp("large")
    return tiny_models.make(directory, "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)


@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"memory_budget": "6GiB"}, {"sampler": "vllm"}, {"device": "cuda:1"}]
)
def test_one_rule_says_what_needs_one_device(
    tmp_path: Path, large_shape: ModelShape, options: dict[str, object]
) -> None:
    shape, totals = large_shape, [4 * GIBIBYTE] * 4
    free = Settings(data_dir=tmp_path)
    assert (
        find_reason_for_one_device(free, shape) == "" and len(list_layouts(free, shape, totals, {}, has_gpus=True)) > 1
    )
    settings = Settings.model_validate({"data_dir": tmp_path, **options})
    (layout,) = list_layouts(settings, shape, totals, {}, has_gpus=True)
    assert layout.num_slots == 1 and find_reason_for_one_device(settings, shape)
    assert find_reason_for_one_device(free, shape, num_sharing=2) == "2 engines and samplers share this machine"
    quantised = list_layouts(Settings(data_dir=tmp_path, quantize="int8"), shape, totals, {}, has_gpus=True)
    assert all(plan.degrees["tensor_parallel"] == 1 and not plan.degrees["shard_base"] for plan in quantised)


def test_the_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 1048576 kB\n")
    assert read_host_memory(tmp_path / "none", tmp_path / "meminfo")[0] == GIBIBYTE
    (tmp_path / "memory.max").write_text(str(GIBIBYTE // 2))
    (tmp_path / "memory.current").write_text(str(GIBIBYTE // 4))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {GIBIBYTE // 8}\n")
    assert read_host_memory(tmp_path, tmp_path / "meminfo") == (3 * GIBIBYTE // 8, GIBIBYTE // 2)


def test_a_family_that_the_planner_does_not_know_takes_the_bytes_of_its_files(tmp_path: Path) -> None:
    shape = tiny_models.make(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_family"}))
    (layout,) = list_layouts(Settings(data_dir=tmp_path), shape, [GIBIBYTE], {}, has_gpus=False)
    assert layout.num_slots == 1 and layout.num_bytes > 512 * 2**20
    with pytest.raises(SettingsError, match="no_such_family"):
        list_layouts(Settings(data_dir=tmp_path), shape, [GIBIBYTE], {"tensor_parallel": 2}, has_gpus=False)
