"""A run as a notebook shows it: its base model, status, step, newest metrics, and the link to its page. Knows HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from tinsmith.errors import TinsmithError, refusal
from tinsmith.exchange.console_urls import ConsoleUrl, locate_run, run_url
from tinsmith.runtime import notebook
from tinsmith.settings.environment import client_address

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunCard:
    """A run at the time of the call. `metrics` are the newest optimizer step's, and those that the client logged last;
    a value that was not finite is None.
    """

    run_id: str
    name: str
    base_model: str
    status: str
    status_reason: str
    step: int
    metrics: Mapping[str, float | None]
    url: ConsoleUrl

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {notebook.format_number(value)}" for name, value in self.metrics.items())
        named = f" {self.name!r}" if self.name else ""
        return f"<run{named} {self.run_id}: {self.base_model}, {self.status}, step {self.step}; {metrics}; {self.url}>"

    def _repr_html_(self) -> str:
        status = f"{self.status}: {self.status_reason}" if self.status_reason else self.status
        facts: dict[str, object] = {"Base model": self.base_model, "Status": status, "Step": self.step}
        facts |= {name: notebook.format_number(value) for name, value in self.metrics.items()}
        return notebook.card(f"Run {self.name or self.run_id}", facts, link=self.url)


def describe_run(run: object, base_url: str = "", api_key: str = "") -> RunCard:
    """The card of a training client's run, a run's id, or the run of a checkpoint's path.

    The server is `base_url`, or the client's, or TINKER_BASE_URL; the key `api_key`, or the client's, or
    TINKER_API_KEY. Raises UserError, NotFoundError for an unknown run, and TinsmithError without a connection.
    """
    server, run_id = locate_run(run, base_url)
    key = api_key or str(getattr(getattr(run, "holder", None), "_api_key", "") or "") or client_address()[1]
    query = {"search": run_id, "columns": "reward,loss", "limit": "1"}
    with httpx.Client(base_url=f"{server}/api/v1/dashboard/", headers={"X-API-Key": key}, timeout=TIMEOUT_S) as http:
        try:
            answer = http.get(f"runs/{quote(run_id, safe='')}")
            listed = http.get("runs", params=query)
        except httpx.TransportError as error:
            raise TinsmithError(f"no connection to {server}: {error}") from None
    for response in (answer, listed):
        if not response.is_success:
            raise refusal(response.status_code, response.text)
    row = answer.json()
    values = next((item["values"] for item in listed.json()["runs"] if item["model_id"] == run_id), {})
    reward = {} if values.get("reward") is None else {"reward": values["reward"]}
    return RunCard(
        run_id=run_id,
        name=row["name"] or "",
        base_model=row["base_model"],
        status=row["status"],
        status_reason=row["status_reason"] or "",
        step=row["step"],
        metrics=reward | row["metrics"],
        url=run_url(server, run_id),
    )
