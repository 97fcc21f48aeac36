"""The addresses of the dashboard's pages of runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tinsmith
from tinsmith.errors import UserError


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:8001/")


def test_a_run_is_named_by_its_client_its_id_or_a_checkpoint() -> None:
    run_id = "49d92811:train:0"
    page = "http://127.0.0.1:8001/#/runs/49d92811%3Atrain%3A0"
    client = SimpleNamespace(get_info=lambda: SimpleNamespace(model_id=run_id))
    for run in (client, run_id, f"tinker://{run_id}", f"tinker://{run_id}/weights/a"):
        assert tinsmith.console_url(run) == page
    client.holder = SimpleNamespace(_base_url="http://127.0.0.1:9000")
    assert tinsmith.console_url(client) == page.replace("8001", "9000")
    assert tinsmith.console_url(client, "https://tinker.example/prefix/").startswith("https://tinker.example/prefix/#/")


def test_a_notebook_shows_a_link() -> None:
    url = tinsmith.console_url('a"<b>')
    assert url._repr_html_() == f'<a href="{url}" target="_blank" rel="noopener">{url}</a>'
    assert "<b>" not in url


@pytest.mark.parametrize(("run", "says"), [(7, "not a int"), ("", "empty id"), ("tinker://", "empty id")])
def test_what_is_no_run_is_refused(run: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        tinsmith.console_url(run)
