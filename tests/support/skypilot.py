"""A stand-in for SkyPilot whose machines are processes of this one. `make lint-deploy` holds its functions against
SkyPilot's own (`check`), which wants a hundred packages and an account of a cloud.

A managed job goes through SkyPilot's states: STARTING until a machine is free (`capacity`), RUNNING, RECOVERING when
`lose` has taken the machine, and one of the states in which it has ended.
"""

from __future__ import annotations

import enum
import inspect
import os
import signal
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class ManagedJobStatus(enum.Enum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    FAILED_NO_RESOURCE = "FAILED_NO_RESOURCE"

    def is_terminal(self) -> bool:
        return self.value in ("SUCCEEDED", "CANCELLED", "FAILED", "FAILED_NO_RESOURCE")


class ClusterNotUpError(Exception):
    pass


class Task:
    def __init__(self, config: dict[str, Any], secrets: dict[str, str]) -> None:
        self.config, self.secrets = config, secrets

    @staticmethod
    def from_yaml_config(
        config: dict[str, Any],
        env_overrides: list[tuple[str, str]] | None = None,
        secrets_overrides: list[tuple[str, str]] | None = None,
    ) -> Task:
        assert not env_overrides
        secrets = dict(secrets_overrides or ())
        assert set(secrets) == set(config["secrets"])
        return Task(config, secrets)


@dataclass
class Record:
    """A managed job, and the machine that it has."""

    job_id: int
    job_name: str
    task: Task
    directory: Path
    status: ManagedJobStatus = ManagedJobStatus.STARTING
    failure_reason: str | None = None
    machines: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lost: int = 0

    def lose(self) -> None:
        """The cloud takes the machine back."""
        self.lost += 1
        os.killpg(self.machines[-1].pid, signal.SIGKILL)

    def _machine(self) -> subprocess.Popen[bytes]:
        """Runs the task's `run`. What its `setup` would install is this source tree's."""
        home = self.directory / f"{self.job_id}-{len(self.machines)}"
        command = home / "venv/bin/tinsmith"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinsmith.cli "$@"\n')
        command.chmod(0o755)
        env = {**os.environ, **self.task.config["envs"], **self.task.secrets, "HOME": str(home)}
        with (home / "log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", self.task.config["run"]],
                env=env,
                cwd=home,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self) -> None:
        while True:
            lost = self.lost
            self.machines.append(self._machine())
            if self.status != ManagedJobStatus.CANCELLING:
                self.status = ManagedJobStatus.RUNNING
            code = self.machines[-1].wait()
            if self.status == ManagedJobStatus.CANCELLING:
                self.status = ManagedJobStatus.CANCELLED
                return
            if self.lost == lost:
                self.status = ManagedJobStatus.FAILED if code else ManagedJobStatus.SUCCEEDED
                return
            self.status = ManagedJobStatus.RECOVERING


class Jobs:
    """`sky.jobs`. `capacity` says whether machines are free now."""

    def __init__(self, directory: Path) -> None:
        self.records: list[Record] = []
        self.capacity = True
        self._directory = directory
        self._answers: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def _answer(self, value: object) -> str:
        request_id = f"request-{len(self._answers)}"
        self._answers[request_id] = value
        return request_id

    def get(self, request_id: str) -> Any:  # noqa: ANN401
        value = self._answers[request_id]
        if isinstance(value, Exception):
            raise value
        return value

    def launch(self, task: Task, name: str | None = None) -> str:
        assert isinstance(task, Task)
        record = Record(len(self.records) + 1, name or "", task, self._directory)
        self.records.append(record)
        if self.capacity:
            self._threads.append(threading.Thread(target=record.run, daemon=True))
            self._threads[-1].start()
        return self._answer(([record.job_id], None))

    def queue_v2(self, refresh: bool, fields: list[str] | None = None, name_match: str | None = None) -> str:
        assert refresh and fields
        if not self.records:
            return self._answer(ClusterNotUpError("the jobs controller is not up"))
        records = [types.SimpleNamespace(**{name: getattr(record, name) for name in fields}) for record in self.records]
        records = [record for record in records if (name_match or "") in record.job_name]
        return self._answer((records, len(records), {}, len(records)))

    def cancel(self, job_ids: list[int] | None = None) -> str:
        for record in self.records:
            if record.job_id in (job_ids or ()) and not record.status.is_terminal():
                if record.machines:
                    record.status = ManagedJobStatus.CANCELLING
                    os.killpg(record.machines[-1].pid, signal.SIGKILL)
                else:
                    record.status = ManagedJobStatus.CANCELLED
        return self._answer(None)

    def close(self) -> None:
        self.cancel([record.job_id for record in self.records])
        for thread in self._threads:
            thread.join(60)


def module(directory: Path) -> Any:  # noqa: ANN401
    """The module `sky`, with its machines below a directory."""
    sky_module: Any = types.ModuleType("sky")
    sky_module.__spec__ = ModuleSpec("sky", None)
    sky_module.Task, sky_module.jobs = Task, Jobs(directory)
    sky_module.get = sky_module.jobs.get
    sky_module.exceptions = types.SimpleNamespace(ClusterNotUpError=ClusterNotUpError)
    return sky_module


def check(sky: Any) -> None:  # noqa: ANN401
    """That SkyPilot has what the stand-in has: functions with these parameters, states, and fields of records."""
    pairs = [
        (Task.from_yaml_config, sky.Task.from_yaml_config),
        (Jobs.launch, sky.jobs.launch),
        (Jobs.queue_v2, sky.jobs.queue_v2),
        (Jobs.cancel, sky.jobs.cancel),
        (Jobs.get, sky.get),
    ]
    for ours, theirs in pairs:
        parameters = inspect.signature(theirs).parameters
        parameter_names = [name for name in inspect.signature(ours).parameters if name != "self"]
        assert set(parameter_names) <= set(parameters), (theirs, parameter_names, list(parameters))
        required = {
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
        }
        assert required <= set(parameter_names), (theirs, required)
    for status in ManagedJobStatus:
        assert sky.jobs.ManagedJobStatus(status.value).is_terminal() == status.is_terminal(), status
    assert issubclass(sky.exceptions.ClusterNotUpError, Exception)
    from sky.schemas.api.responses import ManagedJobRecord  # pyright: ignore[reportMissingImports]

    assert {"job_id", "job_name", "status", "failure_reason"} <= set(ManagedJobRecord.model_fields)
