"""Signatures: the data that they cover, and the source of the secret."""

from __future__ import annotations

import threading
from pathlib import Path

import jwt
import pytest

from tinsmith.auth.signing import SECRET_FILE, Signer, load_secret
from tinsmith.errors import SettingsError

SECRET = bytes(range(32))


def test_a_token_holds_for_its_purpose_claims_and_secret_only() -> None:
    signer, claims = Signer(SECRET), {"path": "/a", "exp": 5}
    token = signer.sign("download", claims)
    assert signer.read("download", token, ("path", "exp")) == claims, "its expiry is the caller's to check"
    assert signer.read("token", token, ("path",)) is None
    assert signer.read("download", token, ("path", "tenant")) is None, "a required claim is missing"
    assert Signer(SECRET[::-1]).read("download", token, ("path",)) is None
    header, payload, signature = token.split(".")
    changed = signer.sign("download", {"path": "/b", "exp": 5}).split(".")[1]
    assert signer.read("download", f"{header}.{changed}.{signature}", ("path",)) is None
    unsigned = jwt.encode(claims, "", algorithm="none")
    assert signer.read("download", unsigned, ("path",)) is None
    assert signer.read("download", f"{unsigned.split('.')[0]}.{payload}.{signature}", ("path",)) is None


@pytest.mark.parametrize("token", ["", "x", "\xe4", "\ud800", "=" * 43, "a.b.c", "..", "." * 1000])
def test_no_text_at_all_breaks_the_reading_of_a_token(token: str) -> None:
    assert Signer(SECRET).read("download", token, ("path",)) is None


def test_a_token_may_stand_in_a_url() -> None:
    signer = Signer(SECRET)
    for index in range(50):
        token = signer.sign("download", {"path": f"/\xe4?&{index}"})
        assert token.replace("-", "").replace("_", "").replace(".", "").isalnum()


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(SettingsError, match="31 bytes"):
        Signer(SECRET[:31])


def test_the_configured_secret_wins_and_makes_no_file(tmp_path: Path) -> None:
    assert load_secret("s" * 40, tmp_path) == b"s" * 40
    assert not list(tmp_path.iterdir())


def test_the_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    first = load_secret("", tmp_path)
    assert len(first) == 32
    assert load_secret("", tmp_path) == first
    (path,) = tmp_path.iterdir()
    assert path.name == SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600


def test_processes_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    loaded: list[bytes] = []
    threads = [threading.Thread(target=lambda: loaded.append(load_secret("", tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 8
    assert len(set(loaded)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_secret("", tmp_path)
    (tmp_path / SECRET_FILE).chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        load_secret("", tmp_path)
