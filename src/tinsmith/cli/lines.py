"""What `tinsmith serve` prints while it runs: when its base models have loaded, and a line for a minute with work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from tinsmith.base_models import Bases
    from tinsmith.server.process import Server

WORK_LINE_S = 60.0
LOADING_POLL_S = 0.2
MAX_NAMES = 8


def describe_models(bases: Bases) -> str:
    """The served base models: the resident ones by name, of many on demand their number."""
    on_demand = sorted(bases.on_demand)
    loadable = ", ".join(on_demand) if len(on_demand) <= MAX_NAMES else f"{len(on_demand)} base models"
    resident = ", ".join(shape.name for shape in bases.resident)
    return ", ".join(filter(None, (resident, f"{loadable} on demand" if on_demand else "")))


def report_server(server: Server, output: Console) -> None:
    """Print until the process ends."""
    before, counted_at = server.work_counts(), time.monotonic()
    if server.supervisor.loading():
        report_loading(server.supervisor.loading, server.supervisor.failing, output)
    if server.bases.on_demand:
        threading.Thread(target=report_on_demand, args=(server.on_demand.describe_loading, output), daemon=True).start()
    while True:
        time.sleep(WORK_LINE_S)
        counts, at = server.work_counts(), time.monotonic()
        if line := work_line({name: counts[name] - before[name] for name in counts}, at - counted_at):
            output.print(f"{time.strftime('%H:%M:%S')}  {line}", highlight=False)
        before, counted_at = counts, at


def report_loading(loading: Callable[[], str], failing: Callable[[], str], output: Console) -> None:
    """Wait until every engine is ready, and print one line then; on a terminal, count the seconds meanwhile. Prints why
    an engine cannot start, once for each reason."""
    began_at, printed_reason = time.monotonic(), ""
    while loading():
        elapsed_s = time.monotonic() - began_at
        if (reason := failing()) and reason != printed_reason:
            printed_reason = reason
            output.print(f"A base model does not load: {reason}; see the engine's log in the data directory")
        if output.is_terminal:
            output.print(f"The base models load: {elapsed_s:.0f} s", end="\r", highlight=False)
        time.sleep(LOADING_POLL_S)
    output.print(f"The base models have loaded after {time.monotonic() - began_at:.1f} s.", highlight=False)


def report_on_demand(loading: Callable[[], str], output: Console) -> None:
    """Print a line when base models are loaded on demand, and when that has ended, until the process ends."""
    printed_names, began_at = "", time.monotonic()
    while True:
        if (names := loading()) != printed_names:
            at = time.monotonic()
            end_line = f"Loading {printed_names} ended after {at - began_at:.1f} s."
            output.print(f"Loading {names} on demand." if names else end_line, highlight=False, soft_wrap=True)
            printed_names, began_at = names, at
        time.sleep(LOADING_POLL_S)


def work_line(counts: Mapping[str, float], seconds: float) -> str:
    """Summarize the work of some seconds; empty if there was none."""
    if not any(value > 0 for value in counts.values()):
        return ""
    return (
        f"{counts['requests']:,.0f} requests, {counts['trained'] / seconds:,.1f} trained and "
        f"{counts['sampled'] / seconds:,.1f} sampled tokens/s"
    )
