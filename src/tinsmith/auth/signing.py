"""Signatures that only this server, or one that shares its secret, can make: of tokens, and of download addresses.

Every purpose has a key of its own, derived from the one secret, so that what was signed for one purpose is worth
nothing for another. The secret is the setting `signing_secret`, or a file in the data directory that is made once
and that only its owner can read. Knows nothing of what is signed.
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


class Signer:
    """HMAC-SHA256; a signature is 43 characters that may stand in a URL."""

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
        """The key of one purpose, for a library that signs by itself."""
        return hmac.digest(self._secret, b"tinsmith:" + purpose.encode(), hashlib.sha256)


def load_secret(configured: str, data_dir: Path) -> bytes:
    """The configured secret, or that of the data directory. Raises SettingsError."""
    if configured:
        return configured.encode()
    path = data_dir / SECRET_FILE
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    return keep_secret(secrets.token_bytes(SECRET_BYTES), data_dir)


def keep_secret(secret: bytes, data_dir: Path) -> bytes:
    """That of the data directory: this one, if it has none yet. Raises SettingsError."""
    path = data_dir / SECRET_FILE
    # Complete under another name first, then linked: of several processes that make it, one wins and all read the same.
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
        raise SettingsError(f"cannot make {path}: {error.strerror}; set TINSMITH_SIGNING_SECRET instead") from None
    finally:
        draft.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise SettingsError(
                f"others can read {path}, which signs tokens: chmod 600 it, or delete it to get a new one"
            )
        return path.read_bytes()
    except PermissionError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
