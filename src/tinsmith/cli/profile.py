"""`tinsmith profile`: have the engine of a base model trace its next steps, and wait for the files.

It works from any machine that reaches the database; the files lie on the engine's machine. Servers offer the same over
HTTP, below /api/v1/operator. Ctrl-C ends the profile early, and its files are printed; `--stop` does so for a profile
whose command is gone.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.cli.database import DataDir, server_database
from tinsmith.cli.remote import AsJson, output, print_json
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from tinsmith.cluster.profiles import Profile, Profiles

POLL_S = 0.2
BEGIN_S = 60.0
"""An engine begins and ends a profile between two steps. One that takes longer is in a long step, or does not run."""
HINT = "`tinsmith doctor` and the server's log say which engines run"


def profile(
    base_model: Annotated[str, typer.Argument(metavar="MODEL", help="The base model, as the server names it.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=3600.0, help="The most seconds to trace.")] = 30.0,
    stop: Annotated[bool, typer.Option("--stop", help="End the profile that runs.")] = False,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Trace the next steps of a running engine with torch's profiler."""
    from tinsmith.cluster.profiles import FAILED, Profiles

    with server_database(data_dir) as database:
        profiles = Profiles(database)
        finished = _run(profiles, base_model, None if stop else seconds)
        if as_json:
            print_json(asdict(finished))
        if finished.state == FAILED:
            raise UserError(f"there is no profile of {base_model!r}: {finished.reason}")
    if not as_json:
        output.print(f"{len(finished.files)} traces on {finished.host}; Perfetto and chrome://tracing open them")
        for path in finished.files:
            output.print(path, highlight=False, soft_wrap=True)


def _run(profiles: Profiles, base_model: str, seconds: float | None) -> Profile:
    """The end of a profile of some seconds; with None, of the one that runs, which is stopped."""
    if seconds is not None:
        base_models = profiles.base_models_with_engines()
        if base_models and base_model not in base_models:
            served = ", ".join(map(repr, base_models))
            raise UserError(f"base_model {base_model!r} is not served here; served: {served}")
        profiles.request(base_model, seconds)
        with suppress(KeyboardInterrupt):
            return _wait_for_end(profiles, base_model)
    profiles.stop(base_model)
    return _wait_for_end(profiles, base_model)


def _wait_for_end(profiles: Profiles, base_model: str) -> Profile:
    """Wait until the profile has ended. Raises UserError for one that does not begin, which is cancelled, or end."""
    from tinsmith.cluster.profiles import ACTIVE, REQUESTED

    started = time.monotonic()
    while (current := profiles.find(base_model)).state in ACTIVE:
        waited_s = time.monotonic() - started
        if waited_s >= BEGIN_S and current.state == REQUESTED:
            profiles.stop(base_model)
            raise UserError(f"no engine of {base_model!r} began a profile within {BEGIN_S:.0f} s; {HINT}")
        if waited_s >= current.seconds + BEGIN_S:
            raise UserError(f"the profile of {base_model!r} does not end: its engine is in a long step or gone; {HINT}")
        time.sleep(POLL_S)
    return current
