"""The process in which a worker runs the code of a mapper.

`python -m tinsmith.batch.worker.child READ_FD WRITE_FD MARKER_FD` starts it.
Messages (`rpc.py`) come in and go out on two descriptors of their own, so that a mapper may print. The first one holds
the job's specification. Then either assignments follow, each answered by one outcome (`mapper`), or operations, each
answered by its messages and an end (`utility`): counting and splitting, publishing, deleting, recording a row as
failed. The process ends with its input. It knows neither the worker's service nor the coordinator.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from tinsmith.batch.types import DEATHS, Assignment, JobSpec, MapperStartError, Outcome, RowFailure
from tinsmith.batch.worker.rpc import Message, pack, read_frames
from tinsmith.errors import UserError

if TYPE_CHECKING:
    from tinsmith.batch.operations.runtime import Channel

SPANS_IN_A_MESSAGE = 1000
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

    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    first = next(source)
    spec = JobSpec.from_dict(first["spec"])
    if spec.roots is not None:
        from tinsmith.batch.formats.offset_cache import cache_directory
        from tinsmith.storage import locations

        locations.confine([*spec.roots, str(cache_directory())])
    if first["role"] == "mapper":
        _map(spec, source, send, bool(first.get("careful")))
    else:
        _serve(spec, int(first["job_id"]), source, send)


def _die_with(worker_pid: int) -> None:
    """A worker that was killed cannot end its children; one in the middle of a batch would go on for nobody."""
    while os.getppid() == worker_pid:
        time.sleep(WORKER_POLL_S)
    _die()


def _die() -> NoReturn:
    """With everything that the mapper started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _map(spec: JobSpec, source: Iterator[Message], send: Send, careful: bool) -> None:
    from tinsmith.batch.operations.runtime import Channel
    from tinsmith.batch.worker import logs, runtime
    from tinsmith.batch.worker.markers import Marker

    logs.tag_output(runtime.batch_at_work)

    channel = Channel(send)
    given: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, given, channel), daemon=True).start()
    marker = Marker(int(sys.argv[3]))

    def report(outcome: Outcome) -> None:
        send({"outcome": outcome.to_dict()})

    try:
        runtime.run(spec, iter(given.get, None), report, channel, marker, eager=not careful)
    except MapperStartError as error:
        send({"start_error": str(error), "final": error.final})
    except Exception as error:  # noqa: BLE001  whatever it is, the worker must hear of it
        send({"start_error": "".join(traceback.format_exception(error))})


def _read(source: Iterator[Message], given: queue.SimpleQueue[Assignment | None], channel: Channel) -> None:
    """Assignments and answers come on one pipe; who waits for an answer must not wait for who reads rows."""
    for message in source:
        if "answers" in message:
            channel.answered(message["answers"])
        else:
            given.put(_assignment(message))
    channel.close()
    given.put(None)


def _assignment(message: Message) -> Assignment:
    lists = {name: tuple(message.get(name, ())) for name in ("part_bases", "schemas")}
    return Assignment(**{**message, **lists})


def _serve(spec: JobSpec, job_id: int, source: Iterator[Message], send: Send) -> None:
    operations = {"plan": _plan, "publish": _publish, "delete": _delete, "give_up": _give_up}
    for request in source:
        try:
            send({"end": operations[request["op"]](spec, job_id, request, send)})
        except Exception as error:  # noqa: BLE001  the answer of this operation alone
            # What the user can put right is said in one line: where it was raised does not help.
            own = isinstance(error, UserError | OSError)
            text = str(error) if own else "".join(traceback.format_exception(error))
            send({"error": text, "error_type": type(error).__name__, "message": str(error)})


def _plan(spec: JobSpec, _job_id: int, _request: Message, send: Send) -> Message:
    from tinsmith.batch.worker import runtime

    version = {"input_version": runtime.version_of(spec)}
    batches = runtime.plan(spec)
    if isinstance(batches, runtime.Even):
        return {"total_rows": batches.total_rows, "batch_size": batches.batch_size, **version}
    total, spans = 0, []
    for span in batches:
        total = span.end_idx + 1
        spans.append(list(span))
        if len(spans) == SPANS_IN_A_MESSAGE:
            send({"spans": spans})
            spans = []
    if spans:
        send({"spans": spans})
    return {"total_rows": total, **version}


def _publish(spec: JobSpec, job_id: int, request: Message, _send: Send) -> Message:
    """The winners lie in a file, one batch a line; so do the failed rows."""
    from tinsmith.batch.worker import reducing

    index = int(request["output_idx"])
    if index == len(spec.batch_output_formats):
        with open(request["path"], encoding="utf-8") as lines:
            published = reducing.publish_errors(spec, job_id, [json.loads(line) for line in lines])
        assert published is not None
        return published.to_dict()
    return reducing.publish_output(spec, index, job_id, reducing.Winners(request["path"], index)).to_dict()


def _delete(spec: JobSpec, _job_id: int, request: Message, _send: Send) -> Message:
    from tinsmith.batch.worker import reducing

    formats = [*spec.batch_output_formats, *([spec.batch_error_format] if spec.batch_error_format else [])]
    for index, output in enumerate(formats):
        for job_id in request["job_ids"]:
            reducing.delete_parts(output, index, job_id)
    for prefix, output in spec.part_formats.items():
        for job_id in request["job_ids"]:
            reducing.delete_parts(output, int(prefix.rpartition("-")[2]), job_id)
    return {}


def _give_up(spec: JobSpec, _job_id: int, request: Message, _send: Send) -> Message:
    """A row that failed for the last time: its place in every output stays empty, and it is told why."""
    from tinsmith.batch.formats import registry
    from tinsmith.batch.formats.offset_cache import cache_directory

    given = _assignment(request["assignment"])
    try:
        reader = registry.reader_from_dict(spec.batch_input_format)
        (row,) = reader.download_batch(given.start_idx, given.end_idx, str(cache_directory()))
    except Exception:  # noqa: BLE001  what cannot be read is perhaps why it failed
        row = None
    writers = [registry.writer_from_dict(output) for output in spec.batch_output_formats]
    parts = [
        writer.write_part([None], given.span, base) for writer, base in zip(writers, given.part_bases, strict=True)
    ]
    trace = request["error"]
    said = trace.strip().partition("\n")[0] if request["error_type"] in DEATHS else trace.strip().rpartition("\n")[2]
    message = re.sub(rf"^[\w.]*{re.escape(request['error_type'])}: ", "", said)
    failure = RowFailure(given.start_idx, request["error_type"], message, trace, row)
    made = Outcome(given.batch_idx, given.attempt_id, tuple(parts), rows_failed=1, row_failures=(failure,))
    return made.to_dict()


if __name__ == "__main__":
    main()
