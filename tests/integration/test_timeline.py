"""The timeline of a session is a trace in Chrome's format, checked event by event: from rows and from a live run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from support.databases import fresh_url
from support.live import API_KEY, LiveServer
from tinsmith.db.database import Database
from tinsmith.db.factory import open_database
from tinsmith.db.schema import FUTURES
from tinsmith.telemetry.timeline import Traces

Event = dict[str, Any]
# Required fields of each phase, besides ph, pid and tid.
REQUIRED = {
    "M": {"name", "args"},
    "b": {"name", "cat", "id", "ts"},
    "e": {"name", "cat", "id", "ts"},
    "X": {"name", "cat", "ts", "dur"},
}


def check_events(trace: dict[str, Any]) -> list[Event]:
    """Check that a viewer accepts the events: known phases, whole microseconds, nested slices. Return them."""
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    open_slices: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    latest: defaultdict[tuple[object, ...], int] = defaultdict(int)
    threads: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert all(isinstance(event[name], int) and event[name] >= 0 for name in ("ts", "dur") if name in event)
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] not in ("b", "e"):
            continue
        track = (event["pid"], event["cat"], event["id"])
        assert event["ts"] >= latest[track], "time runs backwards in a track"
        latest[track] = event["ts"]
        if event["ph"] == "b":
            open_slices[track].append(event["name"])
        else:
            assert open_slices[track].pop() == event["name"], "slices cross"
    for slices in threads.values():
        for (start, end), (other_start, other_end) in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert other_start >= end or (start <= other_start and other_end <= end), "slices of a thread cross"
    return trace["traceEvents"]


def spans(events: list[Event], request_id: str) -> dict[str, tuple[int, int]]:
    """Name -> (start, end) of the slices of one request that have an end."""
    starts = {event["name"]: event["ts"] for event in events if event["ph"] == "b" and event["id"] == request_id}
    ends = {event["name"]: event["ts"] for event in events if event["ph"] == "e" and event["id"] == request_id}
    return {name: (starts[name], ends[name]) for name in ends}


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = open_database(fresh_url(tmp_path))
    yield database
    database.close()


def trace_of_row(db: Database, **changes: object) -> list[Event]:
    row = {"request_id": "m:1", "tenant_id": "t", "session_id": "s", "base_model": "b", "kind": "forward_backward"}
    row |= {"state": "done", "model_id": "m", "seq_id": 1, "num_tokens": 1, "created_at": 100.0, **changes}
    with db.write() as connection:
        connection.execute(FUTURES.insert(), row)
    return check_events(json.loads(b"".join(Traces(db).write("s"))))


def test_a_request_is_queued_runs_and_is_settled(db: Database) -> None:
    events = trace_of_row(db, started_at=101.5, ran_at=103.0, settled_at=103.25, step=7)
    second = 10**6
    assert spans(events, "m:1") == {
        "forward_backward": (100 * second, 103_250_000),
        "queued": (100 * second, 101_500_000),
        "run": (101_500_000, 103 * second),
        "settle": (103 * second, 103_250_000),
    }
    (work_slice,) = [event for event in events if event["ph"] == "X"]
    assert (work_slice["ts"], work_slice["dur"], work_slice["args"]["step"]) == (101_500_000, 1_500_000, 7)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"m", "requests", "work"}


def test_clocks_that_disagree_make_no_negative_slice(db: Database) -> None:
    events = trace_of_row(db, started_at=99.0, ran_at=98.0, settled_at=97.0)
    assert set(spans(events, "m:1").values()) == {(100 * 10**6, 100 * 10**6)}


def test_unknown_times_are_not_drawn(db: Database) -> None:
    pending = trace_of_row(db, state="pending")
    assert [event["ph"] for event in pending if event["ph"] != "M"] == ["b"]
    old = trace_of_row(db, request_id="m:2", seq_id=2, settled_at=105.0)
    assert spans(old, "m:2") == {"forward_backward": (100 * 10**6, 105 * 10**6)}
    assert not [event for event in old if event["ph"] == "X"]


@pytest.mark.extended
def test_a_live_session_has_its_parts_and_its_steps(nano_server: LiveServer) -> None:
    with tinker.ServiceClient(base_url=nano_server.url, api_key=API_KEY) as service:
        model = service.create_lora_training_client("tinsmith/nano", rank=4).result()
        tensors = {"target_tokens": np.arange(1, 9), "weights": np.ones(8, np.float32)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(list(range(8))), loss_fn_inputs=tensors)
        for _ in range(2):
            model.forward_backward([datum], "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4)
        prompt = types.ModelInput.from_ints([1, 2, 3])
        sampler.sample(prompt, num_samples=1, sampling_params=params).result()
        session_id = service.holder.get_session_id()
    link = nano_server.get(f"sessions/{session_id}/trace_export").json()["url"]
    events = check_events(httpx.get(link).json())
    work_slices = [event for event in events if event["ph"] == "X"]
    kinds = [event["name"] for event in work_slices]
    assert kinds.count("forward_backward") == 2 and kinds.count("optim_step") == 2 and "sample" not in kinds
    steps = [event["args"]["step"] for event in sorted(work_slices, key=lambda event: event["ts"])]
    assert steps == sorted(steps) and steps[0] >= 1
    (sample,) = [event["id"] for event in events if event["ph"] == "b" and event["name"] == "sample"]
    parts = spans(events, sample)
    assert set(parts) == {"sample", "queued", "run", "settle"} and parts["run"][1] > parts["run"][0]
