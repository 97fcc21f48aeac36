"""The process of one checkpoint job: it merges, uploads, or both, and tells its server how far it is.

The first line of standard input is the specification as JSON, with the token of an upload: command lines and
environments are visible to others. Each line of standard output is JSON: `phase` with its figures, then `result`, or
`error` with a sentence for the user. The process ends when its input closes, so also with its server. It has the lowest
priority, is the first to be ended when the host lacks memory, and refuses a merge that would not fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.errors import TinsmithError, UserError
from tinsmith.runtime.host_memory import read_host_memory
from tinsmith.runtime.sizes import GIBIBYTE, MEBIBYTE, format_bytes
from tinsmith.wire.adapter_files import TRAINING_FILES, UNEMBED_TOKENS, WEIGHTS_FILE, read_header

if TYPE_CHECKING:
    from tinsmith.exchange.merging import MergePlan

SPARE_DISK_BYTES = GIBIBYTE
"""What a merge leaves free on the disk."""

SPARE_MEMORY_BYTES = 512 * MEBIBYTE
"""What a merge leaves free in the host's memory."""

MIN_SHARD_BYTES = 64 * MEBIBYTE
REPORT_S = 0.2
MANIFEST = "manifest.json"

Report = Callable[[dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class CheckpointJobSpec:
    """`output` is the directory of the result of a merge, or a scratch directory for an upload."""

    kind: str
    form: str
    dtype: str
    base: str
    base_model: str
    adapter: str
    output: str
    tinker_path: str
    repository: str = ""
    private: bool = True
    token: str = ""


def main() -> None:
    spec = CheckpointJobSpec(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_exit_with_server, daemon=True).start()
    _lower_priority()
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no message

    def report(message: dict[str, object]) -> None:
        text = json.dumps(message)
        lines.write((text.replace(spec.token, "***") if spec.token else text) + "\n")
        lines.flush()

    try:
        report({"result": run(spec, report)})
    except (TinsmithError, OSError) as error:
        report({"error": str(error)})
    except ImportError as error:
        report({"error": f"this server lacks {error.name}; its operator installs tinsmith[engine]"})
    except Exception as error:  # noqa: BLE001  the server shows whatever ended the job
        traceback.print_exc()
        report({"error": f"{type(error).__name__}: {error}"[:1000]})


def run(spec: CheckpointJobSpec, report: Report) -> dict[str, object]:
    """Do the job; returns the columns of its result. Raises UserError."""
    report({"phase": "reading"})
    files = merge_model(spec, report) if spec.form == "model" else list_adapter(Path(spec.adapter))
    if spec.kind == "merge":
        sizes = {name: path.stat().st_size for name, path in files.items()}
        return {"directory": spec.output, "files": sizes, "size_bytes": sum(sizes.values())}
    return {"url": _upload(spec, files, report)}


def merge_model(spec: CheckpointJobSpec, report: Report) -> dict[str, Path]:
    """Merge into `output`; returns its files by name. Raises UserError, also for lack of memory or disk."""
    from tinsmith.exchange import merging

    plan = merging.plan_merge(Path(spec.base), Path(spec.adapter), spec.dtype)
    output = Path(spec.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    check_disk(plan.size_bytes, shutil.disk_usage(output.parent).free)
    shard_bytes = choose_shard_bytes(plan, read_host_memory()[0])
    bytes_after = plan.count_bytes(shard_bytes)
    send = _throttle(report)

    def on_tensor(num_done: int, num_tensors: int) -> None:
        figures = {"done": num_done, "total": num_tensors}
        send({"phase": "merging", **figures, "done_bytes": bytes_after[num_done], "total_bytes": bytes_after[-1]})

    on_tensor(0, len(bytes_after) - 1)
    merging.write_merge(plan, output, shard_bytes=shard_bytes, progress=on_tensor)
    return _list_files(output)


def check_disk(size_bytes: int, free_bytes: int) -> None:
    """Raise UserError unless a merge of this size leaves enough of the disk free."""
    if size_bytes + SPARE_DISK_BYTES > free_bytes:
        raise UserError(
            f"the merged model takes {format_bytes(size_bytes)}, and the server's disk has {format_bytes(free_bytes)} "
            f"free, of which {format_bytes(SPARE_DISK_BYTES)} stay free; delete results that are no longer needed"
        )


def choose_shard_bytes(plan: MergePlan, free_bytes: int) -> int:
    """The size of the files of weights with which a merge fits into memory: a file is there twice while it is written,
    beside the largest tensor in work. Raises UserError if not even small files fit.
    """
    from tinsmith.exchange.merging import SHARD_BYTES

    largest_bytes = plan.largest_tensor_bytes
    available = free_bytes - SPARE_MEMORY_BYTES - plan.largest_work_bytes
    shard_bytes = min(SHARD_BYTES, available // 2)
    smallest_bytes = max(MIN_SHARD_BYTES, largest_bytes)
    if shard_bytes < smallest_bytes:
        needed_bytes = SPARE_MEMORY_BYTES + plan.largest_work_bytes + 2 * smallest_bytes
        raise UserError(
            f"the merge needs {format_bytes(needed_bytes)} of free memory, and the server's host has "
            f"{format_bytes(free_bytes)}; try again when it does less, or merge on another machine "
            "(tinsmith checkpoints merge)"
        )
    return shard_bytes


def _upload(spec: CheckpointJobSpec, files: dict[str, Path], report: Report) -> str:
    from tinsmith.exchange.uploading import upload, write_card

    total = {
        "phase": "uploading",
        "total": len(files),
        "total_bytes": sum(path.stat().st_size for path in files.values()),
    }
    report({**total, "done": 0, "done_bytes": 0})
    send = _throttle(report)
    return upload(
        files,
        write_card(spec.base_model, spec.form, spec.tinker_path),
        spec.repository,
        private=spec.private,
        token=spec.token,
        title=f"Upload {spec.tinker_path}",
        on_sent=lambda num_files, num_bytes: send({**total, "done": num_files, "done_bytes": num_bytes}),
    )


def list_adapter(directory: Path) -> dict[str, Path]:
    """The files of an adapter that others read, by name. Raises UserError if its unembedding has another name."""
    if any(UNEMBED_TOKENS in key for key in read_header(directory / WEIGHTS_FILE)):
        raise UserError(
            "this export names the unembedding as tinker-cookbook does, which PEFT does not read; upload the "
            "checkpoint that it was exported from, or the merged model"
        )
    hidden = {*TRAINING_FILES, MANIFEST}
    return {name: path for name, path in _list_files(directory).items() if name not in hidden}


def _list_files(directory: Path) -> dict[str, Path]:
    """All files by their path within the directory."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path for path in paths}


def _throttle(report: Report) -> Report:
    """Pass on a message at most every REPORT_S, and each that completes its phase."""
    sent_at = 0.0

    def send(message: dict[str, Any]) -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at >= REPORT_S or message["done"] == message["total"]:
            sent_at = time.monotonic()
            report(message)

    return send


def _lower_priority() -> None:
    os.nice(19)
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def _exit_with_server() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
