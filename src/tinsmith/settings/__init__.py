"""The frozen settings. This package alone reads the environment.

The sources, in order of precedence, are the command line, `TINSMITH_*` variables and defaults. Unknown keys are
refused. `docs/settings.md` is generated from the docstrings of the fields.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import SecretStr, ValidationError

from tinsmith.errors import SettingsError
from tinsmith.settings.groups import (
    PREFIX,
    AddressSettings,
    BatchSettings,
    LimitSettings,
    ModelSettings,
    ProcessSettings,
    RemoteSamplerSettings,
    SessionSettings,
    StorageSettings,
    TelemetrySettings,
    TenantSettings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

T = TypeVar("T")

RANK_ADDRESS_FILE = "ranks.address"
"""The file of an engine's data directory with the address at which ranks of other machines join."""

FORMER_NAMES = {
    "kept_samples": "stored_samples",
    "kept_samples_of_run": "stored_samples_of_run",
    "kept_samples_days": "stored_samples_days",
}
"""Names that settings had in an earlier release, which are still read. The new name has precedence."""


class Settings(
    AddressSettings,
    StorageSettings,
    ProcessSettings,
    ModelSettings,
    RemoteSamplerSettings,
    LimitSettings,
    SessionSettings,
    TenantSettings,
    BatchSettings,
    TelemetrySettings,
):
    """All settings of a process."""

    @property
    def rank_peer(self) -> str:
        """This machine's address for an engine's ranks on other machines; empty without any."""
        return self.peer_host if self.machines > 1 else ""

    @property
    def listening_port(self) -> int | None:
        """The HTTP port of this process; None if it serves no HTTP."""
        return self.port if self.answers_clients else self.health_port

    @property
    def num_torch_processes(self) -> int:
        """Engines and samplers that share this machine; all that are started on demand count as one."""
        on_demand = int(self.loads_on_demand and self.num_engines > 0)
        return self.num_engines * self.num_resident_models + on_demand + self.num_samplers

    @property
    def computes_alone(self) -> bool:
        """Whether one process computes for this server."""
        is_single = self.num_torch_processes == 1 and not self.loads_on_demand
        return is_single and self.resolved_backend != "sharded" and not self.samples_elsewhere


def load(overrides: dict[str, object]) -> Settings:
    """Load the settings of this process; `overrides` take precedence over the environment. Raises SettingsError."""
    known_names = sorted(name.upper() for name in Settings.model_fields)
    names = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    for name in names:
        if name not in known_names and name.lower() not in FORMER_NAMES:
            if re.search(r"(^|_)(PORT_\d+_|SERVICE_(HOST|PORT))", name):
                raise SettingsError(
                    f"the environment sets {PREFIX}{name}, as Kubernetes does for a Service of the name tinsmith; set "
                    "enableServiceLinks: false in the pod"
                )
            near = difflib.get_close_matches(name, known_names)
            choices = ", ".join(PREFIX + match for match in near or known_names)
            label = "did you mean" if near else "known settings"
            raise SettingsError(f"the environment sets {PREFIX}{name}, which is not a setting; {label}: {choices}")
    former_values = list_former_values({name.lower(): os.environ[f"{PREFIX}{name}"] for name in names})
    try:
        return Settings.model_validate({**Settings().model_dump(), **former_values, **overrides})
    except ValidationError as error:
        raise SettingsError(_describe_errors(error)) from None


def list_former_values(values: Mapping[str, T]) -> dict[str, T]:
    """The values that have only a setting's former name, by its new one."""
    return {new: values[old] for old, new in FORMER_NAMES.items() if old in values and new not in values}


def portable(settings: Settings) -> dict[str, object]:
    """Return the settings for a process on another machine, as JSON with secrets; shared locations are absolute."""
    values: dict[str, object] = settings.model_dump(mode="json")
    for name, value in settings:
        if isinstance(value, SecretStr):
            values[name] = value.get_secret_value()
    storage = settings.storage_dir
    if "://" not in storage:
        storage = str(Path(settings.storage_location("any")).parent)
    return values | {"database_url": settings.resolved_database_url, "storage_dir": storage}


def _describe_errors(error: ValidationError) -> str:
    def fix(problem: ErrorDetails) -> str:
        if problem["type"].startswith("byte_size"):
            return "it must be a number of bytes, or one with a unit, such as 6GiB"
        return problem["msg"].removeprefix("Value error, ")

    return "; ".join(
        f"{'.'.join(map(str, details['loc']))} is {details['input']!r}: {fix(details)}" for details in error.errors()
    )
