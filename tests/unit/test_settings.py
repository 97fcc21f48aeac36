"""Settings: where they come from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.errors import SettingsError
from tinsmith.settings import KEPT_PRODUCTS, engine_environment, load


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}).port == 8000
    monkeypatch.setenv("TINSMITH_PORT", "9000")
    assert load({}).port == 9000
    assert load({"port": 9001}).port == 9001


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_PROT", "9000")
    with pytest.raises(SettingsError, match=r"TINSMITH_PROT, which is no setting; the nearest: .*TINSMITH_PORT"):
        load({})
    monkeypatch.delenv("TINSMITH_PROT")
    monkeypatch.setenv("TINSMITH_ZZZZZZZZ", "1")
    with pytest.raises(SettingsError, match=r"TINSMITH_ZZZZZZZZ, which is no setting; known: TINSMITH_\w+, "):
        load({})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("memory_budget", "lots", "it must be a number of bytes, or one with a unit"),
        ("storage_dir", "ftp://x", "it must be a directory"),
        ("role", "cook", "Input should be 'all', 'server'"),
    ],
)
def test_a_refusal_says_what_would_be_right(name: str, value: object, fix: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is '{value}': {fix}"):
        load({name: value})


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("hold_s", 31), ("max_body_bytes", 0), ("colour", 1)])
def test_a_bad_value_is_refused_with_its_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        load({name: value})


def test_settings_cannot_change() -> None:
    settings = load({})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_an_engine_keeps_few_compiled_products_unless_the_user_wants_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert {engine_environment()[name] for name in names} == {str(KEPT_PRODUCTS)}
    monkeypatch.setenv(names[0], "2000")
    assert [engine_environment()[name] for name in names] == ["2000", str(KEPT_PRODUCTS)]


def test_an_engine_asks_for_huge_pages_unless_the_user_tunes_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert engine_environment()["GLIBC_TUNABLES"].startswith("glibc.malloc.hugetlb=1:")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert engine_environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=1"


def test_an_engine_has_the_keys_of_a_bucket_only_where_its_files_are_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "AWS_SECRET_ACCESS_KEY" not in engine_environment()
    assert engine_environment(bucket=True)["AWS_SECRET_ACCESS_KEY"] == "secret"


@pytest.mark.parametrize(
    ("given", "location", "bucket"),
    [
        ("", "DATA/checkpoints", False),
        ("/shared/tinsmith", "/shared/tinsmith/checkpoints", False),
        ("file:///shared/tinsmith", "file:///shared/tinsmith/checkpoints", False),
        ("s3://bucket/some/where/", "s3://bucket/some/where/checkpoints", True),
        ("gs://bucket", "gs://bucket/checkpoints", True),
    ],
)
def test_files_are_in_a_directory_or_a_bucket(tmp_path: Path, given: str, location: str, bucket: bool) -> None:
    settings = load({"data_dir": tmp_path, "storage_dir": given})
    assert settings.storage_location("checkpoints") == location.replace("DATA", str(tmp_path))
    assert settings.has_bucket == bucket


@pytest.mark.parametrize("given", ["az://container/x", "s3://", "http://host/x", "memory://name/x"])
def test_a_store_that_is_not_supported_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match="storage_dir is"):
        load({"storage_dir": given})
