"""Signed tokens, links and upload ids, valid on all servers that share one secret.

Each purpose has its own key derived from the secret, so a signature for one purpose is invalid for another. The secret
is the setting `signing_secret`, or else a file in the data directory that is created once with mode 0600.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jwt

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    from jwt.types import Options

SECRET_BYTES = 32
ALGORITHM = "HS256"
SECRET_FILE = "signing.key"
RANKS = "ranks"
"""The purpose of the key with which ranks on other machines join their engine."""


class Signer:
    """Signs claims as JSON Web Tokens with HMAC-SHA256."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise SettingsError(f"the signing secret has {len(secret)} bytes; it needs {SECRET_BYTES} or more")
        self._secret = secret

    def sign(self, purpose: str, claims: Mapping[str, object]) -> str:
        """Return the claims as a token, which hides nothing."""
        return jwt.encode(dict(claims), self.key(purpose), algorithm=ALGORITHM)

    def read(self, purpose: str, token: str, required: Sequence[str]) -> dict[str, Any] | None:
        """Return the claims of a token that was signed for `purpose` and has the required ones; otherwise None. The
        caller checks the claim `exp`, by its own clock.
        """
        options: Options = {"require": list(required), "verify_exp": False, "verify_iat": False}
        try:
            return jwt.decode(token, self.key(purpose), algorithms=[ALGORITHM], options=options)
        except (jwt.InvalidTokenError, UnicodeError):
            return None

    def key(self, purpose: str) -> bytes:
        """Return the derived key of one purpose, for libraries that sign by themselves."""
        return hmac.digest(self._secret, b"tinsmith:" + purpose.encode(), hashlib.sha256)


def load_secret(configured: str, data_dir: Path) -> bytes:
    """Return the configured secret, or the data directory's, which is created on first use. Raises SettingsError."""
    if configured:
        return configured.encode()
    path = data_dir / SECRET_FILE
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    return keep_secret(secrets.token_bytes(SECRET_BYTES), data_dir)


def keep_secret(secret: bytes, data_dir: Path) -> bytes:
    """Store `secret` in the data directory unless it has one, and return the stored one. Raises SettingsError."""
    path = data_dir / SECRET_FILE
    # Written under another name and linked, so that processes which create it concurrently read the same secret.
    draft = data_dir / f".{SECRET_FILE}.{uuid.uuid4().hex}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise SettingsError(f"cannot create {path}: {error.strerror}; set TINSMITH_SIGNING_SECRET instead") from None
    finally:
        draft.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise SettingsError(
                f"other users can read {path}, which signs tokens: chmod 600 it, or delete it to get a new one"
            )
        return path.read_bytes()
    except PermissionError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
