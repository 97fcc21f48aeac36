"""Signatures: the data that they cover, and the source of the secret."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tinsmith.auth.signing import SECRET_FILE, Signer, load_secret
from tinsmith.errors import SettingsError

SECRET = bytes(range(32))


def test_a_signature_holds_for_its_purpose_message_and_secret_only() -> None:
    signer = Signer(SECRET)
    signature = signer.sign("download", b"a file")
    assert signer.verify("download", b"a file", signature)
    assert not signer.verify("token", b"a file", signature)
    assert not signer.verify("download", b"a filf", signature)
    assert not Signer(SECRET[::-1]).verify("download", b"a file", signature)


@pytest.mark.parametrize("signature", ["", "x", "\xe4", "\ud800", "=" * 43])
def test_no_text_at_all_breaks_verification(signature: str) -> None:
    assert not Signer(SECRET).verify("download", b"a file", signature)


def test_a_signature_may_stand_in_a_url() -> None:
    signer = Signer(SECRET)
    for index in range(50):
        signature = signer.sign("download", str(index).encode())
        assert len(signature) == 43
        assert signature.replace("-", "").replace("_", "").isalnum()


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
