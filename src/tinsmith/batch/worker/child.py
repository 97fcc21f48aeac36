"""The process in which a worker runs a mapper or an operation.

`python -m tinsmith.batch.worker.child READ_FD WRITE_FD MARKER_FD [MODULE...]` starts it and imports the modules.
Messages (`frames.py`) use two separate descriptors, so that a mapper may print. The first message holds the
specification of the job and the path of the log. A child in the role `mapper` then reads assignments and replies with
an outcome for each, or gives it back when it is asked to; those in the role `stage` are its own children
(`pipeline.py`). One in the role `io` runs the operations of
`io_operations.py`, replying to each with messages and an end. The process ends with its input, or with its worker's
process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tinsmith.batch.types import Assignment, JobSpec, MapperStartError
from tinsmith.batch.worker import logs
from tinsmith.batch.worker.frames import Message, pack, read_frames
from tinsmith.batch.worker.marker import Marker

if TYPE_CHECKING:
    from tinsmith.batch.operations.runtime import Channel
    from tinsmith.batch.worker.feed import BoundedQueue

WORKER_POLL_S = 0.5

Send = Callable[[Message], None]


def main() -> None:
    source = read_frames(os.fdopen(int(sys.argv[1]), "rb"))
    target = os.fdopen(int(sys.argv[2]), "wb")
    lock = threading.Lock()

    def send(message: Message) -> None:
        try:
            frame = pack(message)
            with lock:
                target.write(frame)
                target.flush()
        except BrokenPipeError:
            _die()

    threading.Thread(target=_exit_with_worker, args=(os.getppid(),), daemon=True).start()
    for module in sys.argv[4:]:
        importlib.import_module(module)
    first = next(source, None)
    if first is None:
        return
    logs.write_to(first["log_path"], 1, 2)
    spec = JobSpec.from_dict(first["spec"])
    if spec.roots is not None:
        from tinsmith.batch.formats.offset_cache import cache_directory
        from tinsmith.storage import locations

        locations.confine([*spec.roots, str(cache_directory())])
    if first["role"] == "mapper":
        _map(spec, source, send, first)
    elif first["role"] == "stage":
        _map_stage(spec, source, send, first["stage"])
    else:
        from tinsmith.batch.worker import io_operations

        for request in source:
            for message in io_operations.run(spec, first["job_id"], request):
                send(message)


def _exit_with_worker(worker_pid: int) -> None:
    """End this process when its worker has ended: a worker that was killed cannot end its children."""
    while os.getppid() == worker_pid:
        time.sleep(WORKER_POLL_S)
    _die()


def _die() -> NoReturn:
    """Kill this process and all processes that the mapper started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _map(spec: JobSpec, source: Iterator[Message], send: Send, first: Message) -> None:
    """Run the mapper over the assignments. A careful child reads the rows of a batch only when the mapper asks for
    it."""
    from tinsmith.batch.operations.runtime import Channel
    from tinsmith.batch.worker import runtime
    from tinsmith.batch.worker.feed import BoundedQueue
    from tinsmith.batch.worker.pipeline import StageLauncher

    logs.tag_output(runtime.current_batch)
    channel = Channel(send)
    assignments = BoundedQueue[Assignment](lambda _: 0)  # the worker bounds them
    threading.Thread(target=_read, args=(source, assignments, channel, send), daemon=True).start()
    descriptor = int(sys.argv[3])
    launcher = StageLauncher(first["spec"], Path(first["log_path"]), descriptor, first.get("devices"))
    with _report_start_error(send):
        runtime.run(
            spec,
            assignments,
            lambda outcomes: send({"outcomes": [outcome.to_dict() for outcome in outcomes]}),
            channel,
            Marker(descriptor),
            eager=not first.get("careful"),
            launcher=launcher,
        )


def _map_stage(spec: JobSpec, source: Iterator[Message], send: Send, first_step: int) -> None:
    """Run one stage over the batches that the mapper's process sends."""
    from tinsmith.batch.stages import stages_of
    from tinsmith.batch.worker import runtime

    logs.tag_output(runtime.current_batch)
    (stage,) = [stage for stage in stages_of(spec.batch_serialized_fn) if stage.first == first_step]
    with _report_start_error(send):
        runtime.run_stage(spec, stage, source, send, Marker(int(sys.argv[3])))


@contextlib.contextmanager
def _report_start_error(send: Send) -> Iterator[None]:
    try:
        yield
    except MapperStartError as error:
        send({"start_error": str(error), "cause": error.cause})
    except Exception as error:  # noqa: BLE001  the worker reports it
        send({"start_error": "".join(traceback.format_exception(error))})


def _read(source: Iterator[Message], assignments: BoundedQueue[Assignment], channel: Channel, send: Send) -> None:
    """Separate assignments and answers, which share a pipe: an answer must not wait behind rows being read."""
    from tinsmith.batch.worker import runtime

    for message in source:
        if "answers" in message:
            channel.deliver_answers(message["answers"])
        elif "take_back" in message:
            keys = set(map(tuple, message["take_back"]))
            removed = [*assignments.take_back(keys), *runtime.take_back(keys)]
            send({"taken_back": [assignment.key for assignment in removed]})
        else:
            for assignment in map(Assignment.from_dict, message["assignments"]):
                assignments.put(assignment)
    channel.close()
    assignments.close()


if __name__ == "__main__":
    main()
