"""A run as a notebook shows it: its base model, status, step, newest metrics, and the link to its page. Knows HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tinsmith.errors import TinsmithError, refusal
from tinsmith.exchange.console_urls import ConsoleUrl, locate_run, run_url
from tinsmith.runtime import notebook
from tinsmith.settings.environment import client_address

TIMEOUT_S = 30.0
MAX_METRICS = 12
KEY_METRICS = (
    "loss_per_token",
    "loss_per_datum",
    "grad_norm",
    "learning_rate",
    "entropy",
    "kl_sample_train_v2",
)
"""The server's metrics that a card shows, in this order."""


@dataclass(frozen=True, slots=True)
class RunCard:
    """A run at the time of the call. `metrics` has at most MAX_METRICS values: those that the client logged, the newest
    first, then those of KEY_METRICS at the newest optimizer step. A value that was not finite is None.
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
        title = f"run {self.name!r}" if self.name else "run"
        return f"<{title} {self.run_id}: {self.base_model}, {self.status}, step {self.step}; {metrics}; {self.url}>"

    def _repr_html_(self) -> str:
        status = f"{self.status}: {self.status_reason}" if self.status_reason else self.status
        fields: dict[str, object] = {"Base model": self.base_model, "Status": status, "Step": self.step}
        fields |= {name: notebook.format_number(value) for name, value in self.metrics.items()}
        return notebook.card(f"Run {self.name or self.run_id}", fields, link=self.url)


def describe_run(run: object, base_url: str = "", api_key: str = "") -> RunCard:
    """The card of a training client's run, a run's id, or the run of a checkpoint's path.

    The server is `base_url`, or the client's, or TINKER_BASE_URL; the key `api_key`, or the client's, or
    TINKER_API_KEY. Raises UserError, NotFoundError for an unknown run, and TinsmithError without a connection.
    """
    server, run_id = locate_run(run, base_url)
    key = api_key or str(getattr(getattr(run, "holder", None), "_api_key", "") or "") or client_address()[1]
    segment = quote(run_id, safe="")
    with httpx.Client(base_url=f"{server}/api/v1/", headers={"X-API-Key": key}, timeout=TIMEOUT_S) as http:
        try:
            answers = [http.get(path) for path in (f"dashboard/runs/{segment}", f"training_runs/{segment}/metrics")]
        except httpx.TransportError as error:
            raise TinsmithError(f"no connection to {server}: {error}") from None
    for answer in answers:
        if not answer.is_success:
            raise refusal(answer.status_code, answer.text)
    row, points = answers[0].json(), answers[1].json()["points"]
    return RunCard(
        run_id=run_id,
        name=row["name"] or "",
        base_model=row["base_model"],
        status=row["status"],
        status_reason=row["status_reason"] or "",
        step=row["step"],
        metrics=choose_metrics(points, row["metrics"]),
        url=run_url(server, run_id),
    )


def choose_metrics(points: Sequence[Mapping[str, Any]], trained: Mapping[str, float | None]) -> dict[str, float | None]:
    """The metrics of a card, from the points of a run's metrics and those of its newest optimizer step.

    Of the metrics that the client logged at the same step, those whose name has "reward" come first. The client's value
    counts if the server has one of the same name.
    """
    logged: dict[str, float | None] = {}
    for point in sorted((point for point in points if point["source"] == "client"), key=lambda point: -point["step"]):
        for name in sorted(point["metrics"], key=lambda name: "reward" not in name):
            logged.setdefault(name, point["metrics"][name])
    key_metrics = {name: trained[name] for name in KEY_METRICS if name in trained and name not in logged}
    return dict(list(logged.items())[: MAX_METRICS - len(key_metrics)]) | key_metrics
