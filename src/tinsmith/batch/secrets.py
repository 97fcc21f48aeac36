"""Secrets of bulk jobs: a job names them, and the operator's directory has their values.

The directory has a file for each secret, as a mounted secret of Kubernetes or Docker has: `DIRECTORY/NAME` for every
tenant that may run code, or `DIRECTORY/TENANT/NAME` for one, which goes first. The coordinator reads the values
whenever it starts a worker and hands them to it (on a Ray cluster in a call of the actor), and the worker gives them to
the job's processes as environment variables. So a job that is resumed, or that another server continues, gets today's
values, and no value is in a specification, the database, a log, or a command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import UserError

VARIABLE_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
"""The names of environment variables, and so of secrets."""
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class SecretFiles:
    """The secrets of all tenants; `directory` is None on a server without secrets."""

    directory: Path | None = None

    def read(self, tenant_id: str, names: Iterable[str]) -> dict[str, str]:
        """The values of these secrets now. Raises UserError that names the first one that is missing."""
        return {name: self._read_value(tenant_id, name) for name in names}

    def _read_value(self, tenant_id: str, name: str) -> str:
        for file in self._files(tenant_id, name):
            try:
                if not file.is_file():
                    continue
                with file.open("rb") as source:
                    data = source.read(MAX_BYTES + 1)
                value = data.decode()
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise UserError(f"the secret {name!r} cannot be read: {reason}") from None
            if len(data) > MAX_BYTES or "\0" in value:
                raise UserError(f"the secret {name!r} must be text without NUL characters, at most {MAX_BYTES} bytes")
            return value.removesuffix("\n").removesuffix("\r")
        reason = "does not have it"
        if self.directory is None:
            reason = "has no TINSMITH_BATCH_SECRETS_DIR"
        elif not self.directory.is_dir():
            reason = "has a TINSMITH_BATCH_SECRETS_DIR that is no directory"
        raise UserError(
            f"secrets has {name!r}, and the server {reason}; the operator adds a secret as the file {name} in the "
            "directory TINSMITH_BATCH_SECRETS_DIR"
        )

    def _files(self, tenant_id: str, name: str) -> list[Path]:
        if self.directory is None or not re.fullmatch(VARIABLE_NAME, name):
            return []
        shared = self.directory / name
        is_plain = Path(tenant_id).name == tenant_id and not tenant_id.startswith(".")
        return [self.directory / tenant_id / name, shared] if is_plain else [shared]
