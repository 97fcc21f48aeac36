"""Profiles that an operator asks for while the engine runs (`cluster.profiles`).

An engine looks for a request about once a second, between steps; of several engines of a base model, one begins. A
profile ends after its seconds, when an operator stops it, or when its files are complete; then the row names the files.
A backend that cannot trace refuses by name. An engine that finds a profile of its last process, or of an engine that is
gone, says so: its traces ended with that process.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import structlog

from tinsmith.backends import Backend, RunningProfile
from tinsmith.cluster.profiles import REQUESTED, STOPPING, Profile, Profiles
from tinsmith.errors import UserError

PROFILES_DIRECTORY = "profiles"
"""Below the data directory of the engine's machine."""

log = structlog.get_logger()


def build_operator_profiles(
    profiles: Profiles | None, backend: Backend, base_model: str, engine_id: str, data_directory: Path
) -> OperatorProfiles | None:
    """The profiles of an engine, in its machine's data directory; None for an engine without a database of them."""
    if profiles is None:
        return None
    return OperatorProfiles(profiles, backend, base_model, engine_id, data_directory / PROFILES_DIRECTORY)


class OperatorProfiles:
    def __init__(self, profiles: Profiles, backend: Backend, base_model: str, engine_id: str, directory: Path) -> None:
        """Each profile has a directory of its own in `directory`."""
        self._profiles = profiles
        self._engine_id = engine_id
        self._backend = backend
        self._base_model = base_model
        self._directory = directory
        self._running: RunningProfile | None = None
        self._ends_at = 0.0  # of the one that runs

    def poll(self) -> None:
        """Begin or end a profile. A database error changes nothing that the next poll does not find."""
        profile = self._profiles.find_active(self._base_model)
        if profile is None:
            return
        if self._running is not None:
            if profile.state == STOPPING or time.monotonic() >= self._ends_at or self._running.is_full:
                self._end(profile, self._running)
        elif profile.state == REQUESTED:
            self._begin(profile)
        elif profile.engine_id == self._engine_id or not self._profiles.is_alive(profile.engine_id):
            self._profiles.finish(profile, (), "its engine ended; ask for another one")

    def _begin(self, profile: Profile) -> None:
        began_at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(profile.requested_at))
        directory = self._directory / f"{self._base_model.replace('/', '--')}-{began_at}"
        if not self._profiles.begin(self._base_model, self._engine_id, socket.gethostname()):
            return
        try:
            self._running = self._backend.start_profile(directory)
        except (UserError, OSError) as error:
            self._profiles.finish(profile, (), str(error))
            return
        self._ends_at = time.monotonic() + profile.seconds
        log.info("profile begun", base_model=self._base_model, directory=str(directory))

    def _end(self, profile: Profile, running: RunningProfile) -> None:
        files: list[str] = []
        reason: str | None = None
        try:
            files = [str(path) for path in running.stop()]
        except UserError as error:
            reason = str(error)
        self._profiles.finish(profile, files, reason)
        self._running = None
        log.info("profile finished", base_model=self._base_model, files=len(files), reason=reason)
