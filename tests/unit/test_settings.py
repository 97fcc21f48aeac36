"""Settings: their sources and validation."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinsmith.cli import main as cli
from tinsmith.errors import SettingsError
from tinsmith.plan import versions
from tinsmith.settings import FORMER_NAMES, Settings, load
from tinsmith.settings.environment import CACHED_MATMULS, engine_environment


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}).port == 8000
    monkeypatch.setenv("TINSMITH_PORT", "9000")
    assert load({}).port == 9000
    assert load({"port": 9001}).port == 9001


@pytest.mark.parametrize(("former", "name"), list(FORMER_NAMES.items()))
def test_a_setting_is_read_by_its_former_name_unless_the_new_one_is_set(
    monkeypatch: pytest.MonkeyPatch, former: str, name: str
) -> None:
    monkeypatch.setenv(f"TINSMITH_{former.upper()}", "11")
    assert getattr(load({}), name) == 11
    assert getattr(parse_serve_settings(monkeypatch), name) == 11
    assert getattr(parse_serve_settings(monkeypatch, "--backend-options", f'{{"{former}": 12}}'), name) == 12
    both = f'{{"{name}": 15, "{former}": 12}}'
    assert getattr(parse_serve_settings(monkeypatch, "--backend-options", both), name) == 15
    assert getattr(load({name: 13}), name) == 13
    monkeypatch.setenv(f"TINSMITH_{name.upper()}", "14")
    assert getattr(load({}), name) == 14
    monkeypatch.delenv(f"TINSMITH_{name.upper()}")
    monkeypatch.setenv(f"TINSMITH_{former.upper()}", "-1")
    with pytest.raises(SettingsError, match=f"^{name} is '-1'"):
        load({})


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_PROT", "9000")
    with pytest.raises(SettingsError, match=r"TINSMITH_PROT, which is not a setting; did you mean: .*TINSMITH_PORT"):
        load({})
    monkeypatch.delenv("TINSMITH_PROT")
    monkeypatch.setenv("TINSMITH_ZZZZZZZZ", "1")
    with pytest.raises(
        SettingsError, match=r"TINSMITH_ZZZZZZZZ, which is not a setting; known settings: TINSMITH_\w+, "
    ):
        load({})


@pytest.mark.parametrize("name", ["PORT_80_TCP", "PORT_80_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_HTTP"])
def test_the_variables_of_a_kubernetes_service_are_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"TINSMITH_{name}", "10.96.0.10")
    with pytest.raises(SettingsError, match=f"TINSMITH_{name}, .*set enableServiceLinks: false"):
        load({})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("memory_budget", "lots", "it must be a number of bytes, or one with a unit"),
        ("storage_dir", "ftp://x", "it must be a directory"),
        ("role", "cook", "Input should be 'all', 'server'"),
    ],
)
def test_a_refusal_names_a_valid_value(name: str, value: object, fix: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is '{value}': {fix}"):
        load({name: value})


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("hold_s", 31), ("max_body_bytes", 0), ("colour", 1)])
def test_a_bad_value_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        load({name: value})


def parse_serve_settings(monkeypatch: pytest.MonkeyPatch, *words: str) -> Settings:
    """The settings of `tinsmith serve` with these arguments."""
    parsed: list[Settings] = []
    monkeypatch.setattr(cli, "serve_until_signal", lambda settings, **_options: parsed.append(settings))
    result = CliRunner().invoke(cli.app, ("serve", *words))
    if result.exception is not None:
        raise result.exception
    return parsed[0]


def test_settings_of_the_engine_are_flags_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = {
        "database_url": f"sqlite:///{tmp_path / 'db'}",
        "storage_dir": "s3://bucket/prefix",
        "session_timeout_s": 60.5,
        "session_sweep_s": -1.0,
        "sampler_sequences": 32,
        "sampler_loaded_adapters": 4,
        "kv_cache_bytes": 2**30,
    }
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    settings = parse_serve_settings(monkeypatch, *words)
    assert {name: getattr(settings, name) for name in flags} == flags


def test_further_settings_are_a_json_object_between_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_ENGINE_THREADS", "2")
    json_options = '{"engine_threads": 4, "port": 1, "memory_budget": "6GiB", "models": ["a=/a"]}'
    settings = parse_serve_settings(monkeypatch, "--port", "2", "--backend-options", json_options)
    assert (settings.engine_threads, settings.port, settings.memory_budget) == (4, 2, 6 * 2**30)
    assert settings.models == ("a=/a",)
    for words, problem in (
        ("{", "which is not JSON"),
        ("[1]", "it must be a JSON object of settings"),
        ('{"threads": 1}', "names 'threads', which is not a setting"),
        ('{"engine_threads": "many"}', "engine_threads is 'many'"),
    ):
        with pytest.raises(SettingsError, match=problem):
            parse_serve_settings(monkeypatch, "--backend-options", words)


def test_the_help_of_serve_groups_its_flags() -> None:
    said = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ("serve", "--help")).stdout
    positions = [said.index(f" {group} ") for group in cli.SERVE_OPTIONS]
    assert positions == sorted(positions)
    assert (
        positions[-3] < said.index("--database-url") < positions[-2] < said.index("--session-sweep-s") < positions[-1]
    )


def test_settings_cannot_change() -> None:
    settings = load({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_an_engine_keeps_few_compiled_products_unless_the_user_wants_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert {engine_environment()[name] for name in names} == {str(CACHED_MATMULS)}
    monkeypatch.setenv(names[0], "2000")
    assert [engine_environment()[name] for name in names] == ["2000", str(CACHED_MATMULS)]


def test_an_engine_asks_for_huge_pages_unless_the_user_tunes_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert engine_environment()["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert engine_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


def test_threads_sleep_sooner_beside_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert [engine_environment(computes_alone=cases)["GOMP_SPINCOUNT"] for cases in (True, False)] == ["20000", "2000"]
    cases = ({}, {"engines": 2}, {"samplers": 1}, {"sampler": "vllm"}, {"tensor_parallel": 2})
    assert [load(dict(options)).computes_alone for options in cases] == [True, False, False, False, False]


def test_an_engine_has_the_keys_of_a_bucket_only_where_its_files_are_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "AWS_SECRET_ACCESS_KEY" not in engine_environment()
    assert engine_environment(bucket=True)["AWS_SECRET_ACCESS_KEY"] == "secret"


@pytest.mark.parametrize(
    ("storage_dir", "location", "bucket"),
    [
        ("", "DATA/checkpoints", False),
        ("/shared/tinsmith", "/shared/tinsmith/checkpoints", False),
        ("file:///shared/tinsmith", "file:///shared/tinsmith/checkpoints", False),
        ("s3://bucket/some/where/", "s3://bucket/some/where/checkpoints", True),
        ("gs://bucket", "gs://bucket/checkpoints", True),
    ],
)
def test_files_are_in_a_directory_or_a_bucket(tmp_path: Path, storage_dir: str, location: str, bucket: bool) -> None:
    settings = load({"data_dir": tmp_path, "storage_dir": storage_dir})
    assert settings.storage_location("checkpoints") == location.replace("DATA", str(tmp_path))
    assert settings.has_bucket == bucket


@pytest.mark.parametrize("storage_dir", ["az://container/x", "s3://", "http://host/x", "memory://name/x"])
def test_a_store_that_is_not_supported_is_refused(storage_dir: str) -> None:
    with pytest.raises(SettingsError, match="storage_dir is"):
        load({"storage_dir": storage_dir})


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({}, "tinsmith keys create TENANT"),
        ({"data_dir": "/srv/a b"}, "tinsmith keys create TENANT --data-dir '/srv/a b'"),
        ({"database_url": "postgresql://db/t"}, "TINSMITH_DATABASE_URL=... tinsmith keys create TENANT"),
    ],
)
def test_the_command_that_makes_a_key_names_the_servers_database(settings: dict[str, str], command: str) -> None:
    assert Settings.model_validate(settings).create_key_command() == command


def test_a_level_of_logs_is_known_and_takes_either_case() -> None:
    assert load({"log_level": "debug"}).log_level == "DEBUG"
    with pytest.raises(SettingsError, match=r"log_level is 'LOUD'.*'DEBUG', 'INFO', 'WARNING' or 'ERROR'"):
        load({"log_level": "loud"})


@pytest.mark.parametrize(
    ("release", "nodes", "obstacle"),
    [
        ("2.13.0+cpu", ["nvidia0"], "PyTorch 2.13.0+cpu is a build for CPUs"),
        ("2.13.0", [], "this machine has no GPU"),
        ("2.13.0", ["nvidiactl"], "this machine has no GPU"),
        ("2.13.0+cu130", ["nvidia3"], ""),
        ("2.13.0", ["dxg"], ""),
    ],
)
def test_a_gpu_that_cannot_be_there_is_found_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, nodes: list[str], obstacle: str
) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setattr(versions, "Path", lambda _path: tmp_path)
    monkeypatch.setattr(versions, "version", lambda _package: release)
    monkeypatch.setattr(versions.sys, "platform", "linux")
    reason = versions.find_cuda_obstacle()
    assert reason.startswith(obstacle) if obstacle else not reason
