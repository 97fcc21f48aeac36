"""What decides the rows of a job's outputs: so that a script that is run again finds its own job and no other.

The server describes a stored job, the client the one that it would submit, and `differences` names what is not the
same. Readers and writers are described by all of their fields, whatever these are. Options that change only how a job
runs (workers, retries, limits, the interpreter) are left out. Runs nothing of a job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from tinsmith.batch.formats.registry import InputReader, OutputWriter
from tinsmith.batch.markers import DECIDES_ROWS, names_with
from tinsmith.batch.types import JobSpec, identity_of

SECRETS = ("password",)
"""Fields that are neither shown nor part of an identity."""
SHOWN_CHARACTERS = 200
"""Of a value; a longer one is shown as its digest."""
Description = dict[str, Any]
DECIDING_FIELDS = names_with(JobSpec, DECIDES_ROWS)
"""The fields of `JobSpec`, beside its function, input and failed rows, that decide the rows."""


def describe_job(spec: JobSpec) -> Description:
    errors = spec.batch_error_format
    return {
        "function": identity_of(spec.batch_serialized_fn),
        "input": _describe_endpoint(spec.batch_input_format),
        "errors": None if errors is None else _describe_endpoint(errors),
        **{name: _shorten_inside(getattr(spec, name)) for name in DECIDING_FIELDS},
    }


def _describe_endpoint(data: Mapping[str, Any]) -> Description:
    return {name: _shorten(value) for name, value in data.items() if name not in SECRETS}


def _shorten_inside(value: object) -> object:
    return {name: _shorten(inner) for name, inner in value.items()} if isinstance(value, dict) else _shorten(value)


def _shorten(value: object) -> object:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= SHOWN_CHARACTERS else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def differences(
    stored: Mapping[str, Any], new: Mapping[str, Any], reader: InputReader, errors: OutputWriter | None
) -> dict[str, tuple[object, object]]:
    """The properties that are not the same, with the value of the stored job and that of the new one. A field that a
    release added is not a difference while it has its default. `max_failed_rows` is left to the caller."""
    changes: dict[str, tuple[object, object]] = {}
    for name, value in new.items():
        endpoint = {"input": reader, "errors": errors}.get(name)
        if name == "max_failed_rows" or name not in stored or stored[name] == value:
            continue
        if isinstance(value, dict) and isinstance(stored[name], dict) and endpoint is not None:
            defaults = {item.name: item.default for item in fields(endpoint) if item.default is not MISSING}
            before, after = {**defaults, **stored[name]}, {**defaults, **value}
            for field in sorted({*before, *after} - {*SECRETS}):
                if before.get(field) != after.get(field):
                    changes[f"{name} {field}"] = before.get(field), after.get(field)
        else:
            changes[name] = stored[name], value
    return changes
