"""An option of a bulk job has one name, type, default and bound: those of the field of `JobSpec`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from tinsmith.batch import markers
from tinsmith.batch.client.options import ENCODERS, RunOptions, SpecOptions
from tinsmith.batch.job_identity import DECIDING_FIELDS, describe_job
from tinsmith.batch.job_request import JOB_BODY, read_job
from tinsmith.batch.types import DERIVED_FIELDS, JobSpec, Limits
from tinsmith.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs/batch.md").read_text()
JOB: dict[str, Any] = {
    "batch_serialized_fn": "",
    "batch_input_format": {"format": "json", "path": "i"},
    "batch_output_formats": [{"format": "json", "path": "o"}],
}
INTERPRETERS = {"activate_env", "python"}
BY_POSITION = {"batch_size", "activate_env"}
"""Options that `map` takes by position, so that `RunOptions` has them."""


def bare(kind: Any) -> object:  # noqa: ANN401  an annotation
    """A type without markers and without None."""
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return bare(arguments[0])
    if NoneType in arguments:
        [inner] = [argument for argument in arguments if argument is not NoneType]
        return bare(inner)
    return get_origin(kind)[tuple(map(bare, arguments))] if arguments else kind


def test_a_type_checkers_options_are_the_fields_of_a_specification() -> None:
    options = markers.option_fields(JobSpec)
    types = get_type_hints(SpecOptions)
    assert types.keys() | BY_POSITION == options.keys()
    assert get_type_hints(RunOptions).keys() >= BY_POSITION
    others = {"limits", "concurrency"}  # which is nested, and which may be two numbers
    plain = types.keys() - (ENCODERS.keys() - {"python"}) - others
    assert {name: types[name] for name in plain} == {name: bare(options[name].kind) for name in plain}


def test_a_request_has_the_fields_of_a_specification_and_their_defaults() -> None:
    names = {field.name for field in fields(JobSpec)}
    assert JOB_BODY.model_fields.keys() == names | {*DERIVED_FIELDS}
    assert read_job(JOB) == JobSpec(**JOB)
    assert read_job({**JOB, "limits": {}}).limits == Limits()


@pytest.mark.parametrize("cls", [JobSpec, Limits])
def test_every_bound_is_that_of_the_request(cls: type) -> None:
    bounded = 0
    for field in markers.fields_of(cls):
        for bounds in bounds_in(field.kind):
            bounded += 1
            beyond = [bounds.low - 1, bounds.high + 1, *([bounds.low] if bounds.is_open else [])]
            for number in beyond:
                value: object = {"r": number} if field.name == "resources" else number
                inner = {field.name: value}
                path = ("limits." if cls is Limits else "") + field.name
                with pytest.raises(UserError, match=rf"^{path}(\.r)? is -?\d+; it must"):
                    read_job({**JOB, **({"limits": inner} if cls is Limits else inner)})
    assert bounded == {JobSpec: 16, Limits: 8}[cls]


def bounds_in(kind: Any) -> list[markers.Bounds]:  # noqa: ANN401  an annotation
    if isinstance(kind, markers.Bounds):
        return [kind]
    return [bounds for argument in get_args(kind) for bounds in bounds_in(argument)]


def test_a_request_does_not_set_what_the_server_sets() -> None:
    stored = JobSpec(**JOB, storage="here", purge=True, input_snapshot="s", part_formats={"p": {"format": "json"}})
    assert read_job(stored.to_dict()) == JobSpec(**JOB)


def test_the_fields_that_decide_the_rows_are_the_identity() -> None:
    assert {*DECIDING_FIELDS} == {
        *("batch_size", "batch_tokens", "max_failed_rows", "rows", "limit", "env"),
    }
    assert describe_job(JobSpec(**JOB, limit=3))["limit"] == 3


def test_the_page_for_sky_batch_has_the_limits_of_time() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/from-sky-batch.md").read_text()
    rows = re.findall(r"^\|.*\| (\d+) s[^|]*\| `(\w+_s)` \|$", page, re.MULTILINE)
    assert {name: float(seconds) for seconds, name in rows} == {
        name: getattr(Limits(), name) for name in ("discovery_timeout_s", "startup_timeout_s", "heartbeat_timeout_s")
    }


def documented_defaults() -> dict[str, str]:
    """The default of each option in the table of options, by its name; an option of several has its own."""
    table = PAGE.split("## Options and limits of a job", 1)[1].split("\n## ", 1)[0]
    defaults: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, default = (cell.strip() for cell in line.split("|")[1:3])
            options = re.findall(r"`(\w+)", names)
            values = default.split(", ") if len(options) > 1 and "," in default else [default] * len(options)
            defaults |= dict(zip(options, values, strict=True))
    return defaults


def test_the_page_has_the_defaults_of_the_fields() -> None:
    defaults = documented_defaults()
    known = {name: field.default for name, field in markers.option_fields(JobSpec).items()}
    known |= {field.name: field.default for field in markers.fields_of(Limits)}
    assert defaults.keys() <= known.keys()
    for name, text in defaults.items():
        default = known[name]
        absent = "the server's" if name in INTERPRETERS else "none"
        assert text == (f"{default:g}" if isinstance(default, int | float) else default or absent), name
    assert [name for name in known if f"`{name}" not in PAGE and f"{name}=" not in PAGE] == []
