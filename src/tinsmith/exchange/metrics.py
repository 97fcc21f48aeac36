"""Client of a run's metrics: numbers by step, and rewards of single answers, for the dashboard.

Points are sent when one is logged and a second has passed since the last request or a request is full, at `flush` and
`close`, and at process exit. A training loop does not fail because its metrics cannot be sent: up to `MAX_WAITING`
unsent points are kept and sent with the next ones, and `num_waiting` counts them. Points that the server refuses raise
an error.

`RunMetrics` implements tinker_cookbook's logger (`tinker_cookbook.utils.ml_log.Logger`), so it can be added to the
`loggers` of a recipe's logger. Knows HTTP, and neither the SDK nor the cookbook.
"""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import httpx
import numpy as np

from tinsmith.errors import UserError, refusal
from tinsmith.exchange.console_urls import run_url
from tinsmith.runtime import notebook
from tinsmith.settings.environment import client_address
from tinsmith.types import tokens_digest

Value: TypeAlias = "float | Sequence[float]"
"""A list is shown as its mean within its 10th and 90th percentiles."""

TIMEOUT_S = 30.0
EVERY_S = 1.0
BATCH = 256
"""Points of one request."""
MAX_WAITING = 4096
MAX_NAMES = 64
MAX_STEP = 2**53 - 1
MAX_NAME_CHARS = 60
"""Longest name of a metric from another logger; longer ones are left out."""
TIMINGS = "time/"
"""Prefix of the cookbook's metrics that are dropped first if there are too many."""

log = logging.getLogger("tinsmith.metrics")


class RunMetrics:
    """Metrics of one run. The server and the key default to TINKER_BASE_URL and TINKER_API_KEY."""

    def __init__(self, model_id: str, base_url: str = "", api_key: str = "") -> None:
        url, key = client_address()
        self.model_id = model_id
        self._url = f"{(base_url or url).rstrip('/')}"
        self._http = httpx.Client(base_url=f"{self._url}/api/v1/", headers={"X-API-Key": api_key or key})
        self._waiting: list[dict[str, object]] = []
        self._sent_at = 0.0
        self._is_unreachable = False
        self._warned: set[str] = set()
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"RunMetrics({self.model_id!r}, base_url={self._url!r}, num_waiting={self.num_waiting})"

    def _repr_html_(self) -> str:
        fields = {"Server": self._url, "Points that wait": self.num_waiting}
        return notebook.card(f"Metrics of run {self.model_id}", fields, link=run_url(self._url, self.model_id))

    @property
    def num_waiting(self) -> int:
        """The points that the server does not have yet."""
        return len(self._waiting)

    def log(self, metrics: Mapping[str, Value], step: int | None = None) -> None:
        """Log finite numbers, or lists of them, by name. Without a step they belong to the newest optimizer step. A
        step is a whole number of any numeric type.

        Raises UserError for a value that is not finite, another step, and what the server refuses.
        """
        values = {name: _plain(name, value) for name, value in metrics.items()}
        self._waiting.append({"metrics": values} if step is None else {"step": step_of(step), "metrics": values})
        del self._waiting[:-MAX_WAITING]
        is_full = len(self._waiting) % BATCH == 0
        if step is None or is_full or time.monotonic() - self._sent_at >= EVERY_S:
            self.flush()

    def reward(self, prompt: Sequence[int], answers: Iterable[Sequence[int]], rewards: Iterable[float]) -> int:
        """Set the rewards of answers to one prompt, all as tokens. Returns how many stored answers show them now."""
        entries = [
            {"digest": tokens_digest(prompt, answer), "reward": float(reward)}
            for answer, reward in zip(answers, rewards, strict=True)
        ]
        return self._post("dashboard/samples/rewards", {"rewards": entries}).get("updated", 0) if entries else 0

    def flush(self) -> None:
        """Send waiting points."""
        while self._waiting:
            points = self._waiting[:BATCH]
            self._sent_at = time.monotonic()
            del self._waiting[: len(points)]
            if not self._post("log_metrics", {"model_id": self.model_id, "points": points}):
                self._waiting[:0] = points
                return

    def close(self) -> None:
        if not self._http.is_closed:
            atexit.unregister(self.close)
            self.flush()
            self._http.close()

    def __enter__(self) -> RunMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """The server's answer; {} if it is unavailable. Raises the server's refusal."""
        try:
            answer = self._http.post(path, json=body, timeout=TIMEOUT_S)
        except httpx.TransportError as error:
            if not self._is_unreachable:
                log.warning("metrics cannot be sent to %s and are kept: %r", self._url, error)
            self._is_unreachable = True
            return {}
        if answer.status_code in (429, 502, 503, 504):
            return {}
        self._is_unreachable = False
        if not answer.is_success:
            raise refusal(answer.status_code, answer.text)
        return answer.json()

    # The methods of the cookbook's loggers.

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the numbers among these. One that a step cannot take is left out, with a warning for each name."""
        finite, reasons = select_numbers(metrics)
        for name in reasons.keys() - self._warned:
            log.warning("a metric is not logged: %r %s", name, reasons[name])
        self._warned |= reasons.keys()
        for part in parts_of(finite):
            self.log(part, step)

    def log_metrics_event(
        self, metrics: Mapping[str, Any], step: int, step_metric: str, metric_axes: Mapping[str, str] | None = None
    ) -> None:
        del step_metric, metric_axes
        self.log_metrics(metrics, step)

    def log_hparams(self, config: object) -> None:
        """Ignored: the server has the run's configuration."""

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        """Ignored: a summary belongs to no step."""

    def log_long_text(self, key: str, text: str) -> None:
        """Ignored: text is not a metric, and the server keeps samples itself."""

    def enable_event_steps(self) -> None:
        """Ignored: the client sets steps already."""

    def sync(self) -> None:
        self.flush()

    def get_logger_url(self) -> str | None:
        return run_url(self._url, self.model_id)

    @property
    def store(self) -> None:
        return None


def step_of(value: object) -> int:
    """The step that a number names: 3, 3.0 and numpy's equals are step 3. Raises UserError for any other value."""
    step = _as_float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not step.is_integer() or not 0 <= step <= MAX_STEP:
        raise UserError(f"step is {value!r}; it must be a whole number from 0 to {MAX_STEP}")
    return int(step)


def select_numbers(metrics: Mapping[str, object]) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers among another logger's metrics that a step can take, and the reasons why it cannot take others.

    Values that are no numbers, such as text, are in neither. Timings are left out first where there are too many.
    """
    finite: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name, value in metrics.items():
        if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
            continue
        scalar = _as_float(value)
        if not math.isfinite(scalar):
            reasons[name] = f"is {scalar}; a metric is a finite number"
        elif not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            reasons[name] = f"is a name of {len(name)} characters; it must have 1 to {MAX_NAME_CHARS}, all printable"
        else:
            finite[name] = scalar
    names = sorted(finite, key=lambda name: name.startswith(TIMINGS))
    for name in names[2 * MAX_NAMES :]:
        reasons[name] = f"is one of {len(names)} numbers; a step has {2 * MAX_NAMES} at most"
    return {name: finite[name] for name in names[: 2 * MAX_NAMES]}, reasons


def parts_of(finite: Mapping[str, float]) -> Iterator[dict[str, float]]:
    """The numbers in points of at most `MAX_NAMES`."""
    names = list(finite)
    for start in range(0, len(names), MAX_NAMES):
        yield {name: finite[name] for name in names[start : start + MAX_NAMES]}


def _as_float(value: Any) -> float:  # noqa: ANN401  any number
    """Infinity for an integer that is larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _plain(name: str, value: Any) -> float | list[float]:  # noqa: ANN401  also numpy numbers and arrays
    """Raises UserError for a value that is not finite: JSON has none, and one would lose the points beside it."""
    plain = [float(item) for item in value] if np.ndim(value) else float(value)
    if not np.isfinite(plain).all():
        raise UserError(f"metrics.{name} is {value!r}; it must be a finite number, or a list of them")
    return plain
