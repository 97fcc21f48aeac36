"""docs/compatibility.md matches the tests' declarations and covers every method, command and endpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tinker

from recipes.table import ROWS
from support.compatibility import (
    AGAINST,
    DOCUMENT,
    ENDPOINTS,
    EXCEPTIONS,
    LEDGER_ROWS,
    MISSING,
    TESTS,
    Witness,
    cli_commands,
    collect_coverage,
    coverable_names,
    ledger,
    render,
    sdk_methods,
)
from support.live import API_KEY, LiveServer
from tinsmith.api.request import PREFIX

ROUTES = Path(__file__).parents[2] / "docs" / "reference" / "routes.md"


def test_the_document_matches_the_tests() -> None:
    assert DOCUMENT.read_text() == render(), "run scripts/write-compatibility"


def test_every_method_command_and_endpoint_is_driven_or_excepted() -> None:
    driven = set(collect_coverage())
    undriven = coverable_names() - driven - set(EXCEPTIONS)
    assert not undriven, f"no test covers {sorted(undriven)}, and EXCEPTIONS gives no reason"
    assert not driven & set(EXCEPTIONS), f"both covered and excepted: {sorted(driven & set(EXCEPTIONS))}"
    assert all(EXCEPTIONS.values())


def test_declarations_name_existing_things() -> None:
    unknown = (set(collect_coverage()) | set(EXCEPTIONS)) - coverable_names()
    assert not unknown, f"{sorted(unknown)} is no method, command or endpoint"


def test_the_names_are_found_by_looking() -> None:
    assert {"TrainingClient.forward_backward", "RestClient.whoami", "SamplingClient.sample_async"} <= set(sdk_methods())
    assert {"tinker version", "tinker checkpoint push-hf", "tinker billing usage"} <= set(cli_commands())


def test_every_row_of_the_ledger_has_tests_that_exist() -> None:
    rows = ledger()
    expected = {f"{letter}{index}" for letter, count in LEDGER_ROWS.items() for index in range(1, count + 1)}
    assert sorted(row.row for row in rows) == sorted(expected | {"B46", "T16", "T17", "Z"})
    for row in rows:
        assert row.promise and row.tests, f"{row.row} has no test"
        assert row.against in (*AGAINST, MISSING), f"{row.row} runs against {row.against!r}"
        assert row.lacks or row.against != MISSING, f"{row.row} does not say what is missing"
        for test in row.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (TESTS / file).read_text(), f"{row.row} names {test}, which does not exist"


def test_every_endpoint_is_in_the_reference() -> None:
    rows = re.findall(r"^- (GET|POST|PUT|DELETE) `(/[^`]*)`: ", ROUTES.read_text(), re.MULTILINE)
    documented = {f"{method} {path.removeprefix(PREFIX)}" for method, path in rows}
    assert set(ENDPOINTS) <= documented


def test_a_row_has_a_name_of_its_own_and_checks() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.checks for row in ROWS)


def test_a_witness_records_calls(fake_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(monkeypatch)
    tinker.RestClient(base_url=fake_server.url, api_key=API_KEY).list_sessions().result()
    claims = {"RestClient.list_sessions", "GET /sessions", "RestClient.list_training_runs", "GET /training_runs"}
    assert witness.missing(claims) == {"RestClient.list_training_runs", "GET /training_runs"}
