"""Encryption of exported files to age recipients (age-encryption.org), implemented with pyrage.

A recipient is a native key (`age1...`) or an SSH public key. No key is stored.
"""

# pyright: reportAttributeAccessIssue=false
# pyrage is an extension module without type annotations.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyrage

from tinsmith.errors import UserError

SUFFIX = ".age"


def read_recipients(texts: Sequence[str]) -> list[object]:
    """Parse the recipients. Raises UserError that names the invalid one."""
    recipients: list[object] = []
    for index, text in enumerate(texts):
        kind = pyrage.x25519.Recipient if text.startswith("age1") else pyrage.ssh.Recipient
        try:
            recipients.append(kind.from_str(text.strip()))
        except pyrage.RecipientError as error:
            raise UserError(
                f"age_encryption_recipients[{index}] cannot be read ({error}); use a native key 'age1...' "
                "or an SSH public key 'ssh-ed25519 ...' or 'ssh-rsa ...'"
            ) from error
    return recipients


def encrypt_files(directory: Path, texts: Sequence[str]) -> None:
    """Replace every file in `directory` by an encrypted file with the suffix .age."""
    recipients = read_recipients(texts)
    for path in sorted(directory.iterdir()):
        pyrage.encrypt_file(str(path), str(path) + SUFFIX, recipients)
        path.unlink()
