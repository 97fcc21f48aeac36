"""HMAC signatures of tokens and download links, valid on all servers that share one secret.

Each purpose has its own key derived from the secret, so a signature for one purpose is invalid for another. The secret
is the setting `signing_secret`, or else a file in the data directory that is created once with mode 0600.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import uuid
from pathlib import Path

from tinsmith.errors import SettingsError

SECRET_BYTES = 32
SECRET_FILE = "signing.key"
RANKS = "ranks"
"""The purpose of the key with which ranks on other machines join their engine."""


class Signer:
    """HMAC-SHA256; a signature is 43 URL-safe characters."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < SECRET_BYTES:
            raise SettingsError(f"the signing secret has {len(secret)} bytes; it needs {SECRET_BYTES} or more")
        self._secret = secret

    def sign(self, purpose: str, message: bytes) -> str:
        digest = hmac.digest(self.key(purpose), message, hashlib.sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def verify(self, purpose: str, message: bytes, signature: str) -> bool:
        return hmac.compare_digest(self.sign(purpose, message).encode(), signature.encode(errors="replace"))

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
