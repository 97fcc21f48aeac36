"""Permissions of bulk jobs: whether a tenant may run its own code, and which files its jobs reach.

A job runs its tenant's code if its function, one of its formats, its interpreter or environment variables, which may
name code, come with it. A job of operations
in known formats, one operation or a chain of them, runs none, and every tenant may submit one. Workers are processes of
the server's user, with its access to files and buckets, so such a job is confined to its roots: the tenant's own
directory and the locations that the operator has named. Roots are decided at submission and stored in the
specification; workers check every location against them again when they open it (`locations.confine`). A tenant that
may run code is not confined, since its code can reach everything that the server's user can.

Pure except for resolving links. Knows no database and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinsmith.batch import operations
from tinsmith.batch.formats.registry import FORMATS, SHIPPED_KEYS
from tinsmith.batch.types import JobSpec
from tinsmith.errors import ForbiddenError, UserError
from tinsmith.settings import Settings
from tinsmith.settings.groups import BatchSettings
from tinsmith.storage.locations import is_below
from tinsmith.storage.stores import join, split

CONFINED_READERS = frozenset(name for name, format in FORMATS.items() if format.confined and format.reads)
CONFINED_WRITERS = frozenset(name for name, format in FORMATS.items() if format.confined and format.writes)


def authorize_job(spec: JobSpec, settings: Settings, tenant_id: str, keyless: bool) -> JobSpec:
    """Check a tenant's job; returns the specification to store. Raises ForbiddenError, UserError."""
    if spec.roots is not None:
        raise UserError("a bulk job has no field 'roots'; the server decides what it may reach")
    trusted = is_trusted(settings, tenant_id, keyless)
    if code := describe_code(spec):
        check_code(settings, tenant_id, keyless, code)
    spec = replace(spec, storage=settings.storage_location("batch_inputs"))
    return spec if trusted else _confine(spec, tenant_id, roots_of(settings, tenant_id))


def is_trusted(settings: BatchSettings, tenant_id: str, keyless: bool) -> bool:
    return keyless or tenant_id in settings.batch_tenants


def check_code(settings: BatchSettings, tenant_id: str, keyless: bool, code: str) -> None:
    """Raises ForbiddenError if this tenant may not run code here."""
    if not settings.batch_user_code:
        raise ForbiddenError(
            f"this server does not run users' code, and {code}; use operations such as Sample, in the formats of "
            "tinsmith.batch. The operator can allow it with TINSMITH_BATCH_USER_CODE=true"
        )
    if not is_trusted(settings, tenant_id, keyless):
        raise ForbiddenError(
            f"tenant {tenant_id!r} may not run bulk jobs that run its code on the server, and {code}; use operations "
            "such as Sample. The operator can allow it with TINSMITH_BATCH_TENANTS"
        )


def describe_code(spec: JobSpec) -> str:
    """The part of a job that is its own code, in words; empty if there is none."""
    if operations.steps_of(spec.batch_serialized_fn) is None:
        return "batch_serialized_fn is a function"
    if spec.python is not None or spec.batch_activate_env is not None:
        return "the job has its own interpreter"
    if spec.env or spec.secrets:
        return "the job sets environment variables of its processes"
    if any(name in data for data in [spec.batch_input_format, *spec.all_output_formats] for name in SHIPPED_KEYS):
        return "one of its formats has its own source code"
    return ""


def roots_of(settings: Settings, tenant_id: str) -> list[str]:
    """The locations that a tenant's jobs may reach, its own directory first."""
    tenant_directory = str(settings.resolved_data_dir / "batch" / tenant_id)
    return [tenant_directory, *(root.replace("{tenant}", tenant_id) for root in settings.batch_roots)]


def _confine(spec: JobSpec, tenant_id: str, roots: Sequence[str]) -> JobSpec:
    if str(spec.batch_input_format["format"]) not in CONFINED_READERS:
        raise _no_format(tenant_id, spec.batch_input_format, CONFINED_READERS)
    for output in spec.all_output_formats:
        if str(output["format"]) not in CONFINED_WRITERS:
            raise _no_format(tenant_id, output, CONFINED_WRITERS)
    errors = spec.batch_error_format
    return replace(
        spec,
        batch_input_format=_resolve_path(spec.batch_input_format, spec, tenant_id, roots),
        batch_output_formats=[_resolve_path(output, spec, tenant_id, roots) for output in spec.batch_output_formats],
        batch_error_format=None if errors is None else _resolve_path(errors, spec, tenant_id, roots),
        roots=list(roots),
    )


def _resolve_path(data: dict[str, Any], spec: JobSpec, tenant_id: str, roots: Sequence[str]) -> dict[str, Any]:
    """Resolve the path of a format below a root; a relative one is below the tenant's own directory."""
    if not FORMATS[data["format"]].has_location:
        return data
    path = str(data["path"])
    if "\x00" in path:
        raise UserError(f"the path {path!r} has a NUL character; remove it")
    if spec.directory and not is_below(path, roots):
        path = path.removeprefix(f"{spec.directory}/")  # relative again, as the user wrote it
    if "://" not in path and not path.startswith(("/", "~")):
        path = join(roots[0], path)
    scheme, _, key = split(path)
    if not is_below(path, roots):
        raise ForbiddenError(
            f"tenant {tenant_id!r} may not read or write {data['path']!r}. A relative path is below its own directory "
            "on the server; the operator can allow others with TINSMITH_BATCH_ROOTS"
        )
    if scheme == "file":
        path = key + "/" * path.endswith("/")  # normalised, so that workers open the path that was checked
    return {**data, "path": path}


def _no_format(tenant_id: str, data: dict[str, Any], allowed: frozenset[str]) -> ForbiddenError:
    return ForbiddenError(
        f"tenant {tenant_id!r} may not use the format {data['format']!r}, which can reach other files; use one of "
        f"{sorted(allowed)}"
    )
