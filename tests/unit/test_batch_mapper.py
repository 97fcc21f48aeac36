"""Mappers on a worker: every kind of function and error, with one report for each batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.mapper_run import ROWS, MapperRun, Rows
from support.payloads import serialize_function
from tinsmith import batch
from tinsmith.batch.client.dataset import Dataset
from tinsmith.batch.formats.lines import ItemsReader
from tinsmith.batch.types import Assignment, AttemptOutcome, JobSpec, MapperStartError
from tinsmith.batch.worker import runtime
from tinsmith.batch.worker.adapters import convert_batch, rows_of


def test_a_loop_maps_every_batch_and_loads_once(tmp_path: Path) -> None:
    @batch.remote_function
    def gen(factor: int = 1) -> None:
        from tinsmith import batch

        loaded = []
        loaded.append(1)
        for rows in batch.load():
            batch.save_results([{"n": row["n"] * factor, "loads": len(loaded)} for row in rows], tokens_out=len(rows))

    ran = MapperRun(tmp_path, gen, kwargs={"factor": 2})
    assert ran.output() == [{"n": 2 * index, "loads": 1} for index in range(10)]
    assert [(outcome.rows_ok, outcome.rows_failed, outcome.tokens_out) for outcome in ran.outcomes] == [
        (3, 0, 3)
    ] * 3 + [(1, 0, 1)]


def test_an_async_loop_is_awaited(tmp_path: Path) -> None:
    @batch.remote_function
    async def gen() -> None:
        import asyncio

        from tinsmith import batch

        async for rows in batch.load():
            await asyncio.sleep(0)
            batch.save_results([{"n": row["n"] + 1} for row in rows])

    assert MapperRun(tmp_path, gen).output() == [{"n": index + 1} for index in range(10)]


def test_functions_of_rows_go_over_the_row_and_fail_alone(tmp_path: Path) -> None:
    def add(row: dict[str, Any], index: int) -> dict[str, Any]:
        if row["n"] == 4:
            raise ZeroDivisionError("four")
        return {"square": row["n"] ** 2, "index": index}

    ran = MapperRun(tmp_path, add, kind="row", options={"with_indices": True, "remove_columns": ["n"]})
    assert ran.output() == [{"square": index**2, "index": index} for index in range(10) if index != 4]
    [failure] = ran.outcomes[1].row_failures
    assert (failure.idx, failure.error_type, failure.message, failure.row) == (4, "ZeroDivisionError", "four", {"n": 4})
    assert 'raise ZeroDivisionError("four")' in failure.traceback.replace("'", '"')


def test_async_functions_of_rows_run_together(tmp_path: Path) -> None:
    async def add(row: dict[str, Any]) -> dict[str, Any]:
        import asyncio

        await asyncio.sleep(0.2)
        return {"m": row["n"]}

    import time

    began = time.monotonic()
    assert MapperRun(tmp_path, add, kind="row", batch_size=10).output() == [{"n": n, "m": n} for n in range(10)]
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("shape", ["rows", "columns", "numpy", "pandas", "pyarrow"])
def test_functions_of_batches_get_and_give_every_shape(shape: str, tmp_path: Path) -> None:
    def same(rows: object, extra: int) -> object:
        return rows

    ran = MapperRun(tmp_path, same, kind="batch", kwargs={"extra": 1}, options={"batch_format": shape})
    assert ran.output() == ROWS


@pytest.mark.parametrize("shape", ["columns", "numpy", "pandas", "pyarrow"])
def test_a_batch_has_the_columns_of_all_its_rows(shape: str) -> None:
    rows = [{"a": 1}, {"b": "x"}]
    returned = rows_of(convert_batch(rows, shape))
    assert [sorted(row) for row in returned] == [["a", "b"], ["a", "b"]]
    assert returned[0]["a"] == 1 and returned[1]["b"] == "x"


@pytest.mark.parametrize("kind", ["row", "batch"])
def test_a_process_that_a_function_forks_does_not_go_on_with_the_batch(kind: str, tmp_path: Path) -> None:
    def fork(value: Any) -> Any:  # noqa: ANN401
        import os

        if not (pid := os.fork()):
            raise ValueError("in the forked process")
        _, status = os.waitpid(pid, 0)
        rows = value if isinstance(value, list) else [value]
        ended = [{**row, "status": os.waitstatus_to_exitcode(status)} for row in rows]
        return ended if isinstance(value, list) else ended[0]

    ran = MapperRun(tmp_path, fork, kind=kind)
    assert ran.output() == [{**row, "status": 1} for row in ROWS]


def test_a_class_is_made_once(tmp_path: Path) -> None:
    class Count:
        def __init__(self, start: int) -> None:
            self.calls = start

        def __call__(self, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
            self.calls += 1
            return {"n": [row["n"] for row in rows], "call": [self.calls] * len(rows)}

    ran = MapperRun(tmp_path, Count, kind="batch", kwargs={"start": 10})
    assert [row["call"] for row in ran.output()] == [11] * 3 + [12] * 3 + [13] * 3 + [14]


def test_a_batch_function_that_raises_fails_its_batch_alone(tmp_path: Path) -> None:
    def some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if rows[0]["n"] == 3:
            raise ValueError("three")
        return rows

    ran = MapperRun(tmp_path, some, kind="batch")
    assert [bool(outcome.error) for outcome in ran.outcomes] == [False, True, False, False]
    assert ran.outcomes[1].error_type == "ValueError" and "three" in ran.outcomes[1].error
    assert [row["n"] for row in ran.output()] == [0, 1, 2, 6, 7, 8, 9]


def test_a_loop_that_raises_fails_its_batch_and_goes_on(tmp_path: Path) -> None:
    @batch.remote_function
    def gen() -> None:
        from tinsmith import batch

        for rows in batch.load():
            if rows[0]["n"] == 3:
                raise ValueError("three")
            batch.save_results(rows)

    ran = MapperRun(tmp_path, gen)
    assert [bool(outcome.error) for outcome in ran.outcomes] == [False, True, False, False]
    assert 'raise ValueError("three")' in ran.outcomes[1].error.replace("'", '"')


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("save_results(rows[:1])", "returned 1 row for a batch of 3"),
        ("save_results(rows + rows)", "returned 6 rows for a batch of 3"),
        ("pass", "before it called save_results"),
        ("return", "there were batches left"),
        ("save_results(rows); save_results(rows)", "called twice"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_loop_that_breaks_a_rule_fails_its_batch_for_good(body: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "gen_module.py"
    source.write_text(
        "from tinsmith.batch import remote_function\n@remote_function\ndef gen():\n"
        "    from tinsmith.batch import load, save_results\n"
        f"    for rows in load():\n        if rows[0]['n'] == 3:\n            {body}\n        else:\n"
        "            save_results(rows)\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    ran = MapperRun(tmp_path, namespace["gen"])
    assert [bool(outcome.error) for outcome in ran.outcomes] == [False, True, False, False]
    assert [outcome.final for outcome in ran.outcomes] == [False, True, False, False]
    assert message in ran.outcomes[1].error


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            [{"n": 1}],
            'returned 1 row for a batch of 3; it must return one for each row, in the same order. With rows="any"',
        ),
        ({"n": [1, 2]}, "returned 2 rows for a batch of 3"),
        ({"n": [1, 2, 3], "m": [1]}, "unequal length: {'n': 3, 'm': 1}"),
        (None, "returned a NoneType; it must return a list of dicts, a dict of columns or a table"),
        (5, "returned a int"),
        ("abc", "returned a str"),
    ],
)
@pytest.mark.parametrize("merge", [False, True])
def test_a_batch_function_that_returns_no_row_for_each_row_is_not_tried_again(
    returned: object, message: str, merge: bool, tmp_path: Path
) -> None:
    def short(rows: list[dict[str, Any]], returned: object) -> object:
        return returned

    ran = MapperRun(
        tmp_path, short, kind="batch", kwargs={"returned": returned}, options={"merge": merge}, rows=ROWS[:3]
    )
    (outcome,) = ran.outcomes
    assert outcome.error and outcome.final
    assert (message if not merge else message.partition(";")[0]) in outcome.error
    assert "Traceback" not in outcome.error


def test_any_number_of_rows_is_taken_where_the_job_says_so(tmp_path: Path) -> None:
    def regroup(rows: list[dict[str, Any]]) -> list[Any]:
        if rows[0]["n"] == 3:
            return []
        if rows[0]["n"] == 6:
            return [{"n": 6}, None, [{"n": 7}, {"n": 8}], {"n": 9}, {"n": 10}]
        return [{"sum": sum(row["n"] for row in rows)}]

    ran = MapperRun(tmp_path, regroup, kind="batch", rows_mode="any")
    assert ran.output() == [{"sum": 3}, *({"n": n} for n in range(6, 11)), {"sum": 9}]
    assert [outcome.rows_ok for outcome in ran.outcomes] == [3, 3, 3, 1]
    assert [outcome.parts[0].rows for outcome in ran.outcomes] == [1, 0, 5, 1]
    strict = MapperRun(tmp_path / "strict", regroup, kind="batch")
    assert [(bool(outcome.error), outcome.final) for outcome in strict.outcomes] == [(True, True)] * 3 + [
        (False, False)
    ]


@pytest.mark.parametrize("batch_size", [3, 1])
def test_an_error_among_any_number_of_results_is_that_of_its_row_once_the_batch_is_that_row(
    batch_size: int, tmp_path: Path
) -> None:
    def double_rows(rows: list[dict[str, Any]]) -> list[Any]:
        return [{"n": row["n"], "bad": object()} if row["n"] == 4 else row for row in rows for _ in range(2)]

    ran = MapperRun(tmp_path, double_rows, kind="batch", rows_mode="any", batch_size=batch_size)
    if batch_size == 1:
        assert ran.failed_rows == {4: "TypeError"} and len(ran.output()) == 18
    else:
        assert [(bool(outcome.error), outcome.final) for outcome in ran.outcomes] == [(n == 1, False) for n in range(4)]
        assert "column 'bad'" in ran.outcomes[1].error


def test_saving_without_a_batch_is_refused() -> None:
    with pytest.raises(RuntimeError, match="on a worker only"):
        batch.load()
    with pytest.raises(RuntimeError, match="on a worker only"):
        batch.save_results([])


def test_row_errors_are_rows_without_a_result_in_every_output(tmp_path: Path) -> None:
    @batch.remote_function
    def gen() -> None:
        from tinsmith.batch import RowError, load, save_results

        for rows in load():
            results = [
                RowError(KeyError("lost")) if row["n"] == 1 else object() if row["n"] == 2 else {"n": row["n"]}
                for row in rows
            ]
            save_results(
                [{"n": 5, "bad": object()} if isinstance(row, dict) and row["n"] == 5 else row for row in results]
            )

    writers = [batch.JsonWriter(f"{tmp_path}/a.jsonl"), batch.JsonWriter(f"{tmp_path}/b.jsonl", column="n")]
    ran = MapperRun(tmp_path, gen, writers=writers)
    assert ran.failed_rows == {1: "KeyError", 2: "TypeError", 5: "TypeError"}
    assert ran.output(0) == ran.output(1) == [{"n": n} for n in (0, 3, 4, 6, 7, 8, 9)]
    assert [(outcome.rows_ok, outcome.rows_failed) for outcome in ran.outcomes] == [(1, 2), (2, 1), (3, 0), (1, 0)]


def test_rows_can_be_dropped_and_multiplied_where_the_job_says_so(tmp_path: Path) -> None:
    def spread(row: dict[str, Any]) -> object:
        return None if row["n"] % 2 else [{"n": row["n"]}, {"n": -row["n"]}]

    ran = MapperRun(tmp_path, spread, kind="row", rows_mode="any")
    assert [row["n"] for row in ran.output()] == [0, 0, 2, -2, 4, -4, 6, -6, 8, -8]
    assert not ran.failed_rows
    strict = MapperRun(tmp_path / "strict", spread, kind="row")
    assert len(strict.failed_rows) == 10


def test_rows_that_cannot_be_read_fail_alone(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"n":0}\n{bad\n{"n":2}\n{"n":3}\n[]\n')

    def same(row: dict[str, Any]) -> dict[str, Any]:
        return row

    spec = JobSpec(
        batch_serialized_fn=serialize_function(same, kind="row"),
        batch_input_format=batch.JsonReader(f"{tmp_path}/in.jsonl").to_dict(),
        batch_output_formats=[batch.JsonWriter(f"{tmp_path}/o.jsonl").to_dict()],
        batch_size=4,
    )
    outcomes: list[AttemptOutcome] = []
    assignments = [Assignment(0, 0, 3, 1, (f"{tmp_path}/p",)), Assignment(1, 4, 4, 1, (f"{tmp_path}/p",))]
    runtime.run(spec, assignments, outcomes.extend)
    first, second = sorted(outcomes, key=lambda outcome: outcome.batch_idx)
    assert [failure.idx for failure in first.row_failures] == [1] and first.rows_ok == 3
    assert [failure.idx for failure in second.row_failures] == [4] and second.rows_ok == 0
    assert AttemptOutcome.from_dict(first.to_dict()) == first


@pytest.mark.parametrize("body", ["raise OSError('no model')", "return 1", "import nowhere"])
def test_a_mapper_that_does_not_get_to_work_says_why(body: str, tmp_path: Path) -> None:
    source = tmp_path / "gen_module.py"
    source.write_text(f"from tinsmith.batch import remote_function\n@remote_function\ndef gen():\n    {body}\n")
    namespace: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    with pytest.raises(MapperStartError, match=r"no model|without taking a batch|nowhere"):
        MapperRun(tmp_path, namespace["gen"])


def test_who_assigns_may_fail(tmp_path: Path) -> None:
    def same(row: dict[str, Any]) -> dict[str, Any]:
        return row

    spec = JobSpec(
        batch_serialized_fn=serialize_function(same, kind="row"),
        batch_input_format=ItemsReader(items=ROWS).to_dict(),
        batch_output_formats=[batch.JsonWriter(f"{tmp_path}/o.jsonl").to_dict()],
        batch_size=4,
    )

    def broken() -> Iterator[Assignment]:
        yield Assignment(0, 0, 3, 1, (f"{tmp_path}/p",))
        raise ConnectionResetError("gone")

    outcomes: list[AttemptOutcome] = []
    with pytest.raises(ConnectionResetError):
        runtime.run(spec, broken(), outcomes.extend)
    assert [outcome.rows_ok for outcome in outcomes] == [4]


def data_set() -> Dataset:
    return batch.from_items(ROWS)


def test_steps_go_over_a_batch_in_one_pass_and_each_row_fails_alone(tmp_path: Path) -> None:
    limit = 8

    def halve(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if row["n"] == 4:
            raise KeyError("four")
        yield {"half": row["n"] // 2, "square": row["square"]}
        yield {"half": -(row["n"] // 2), "square": row["square"]}

    chain = (
        data_set()
        .map(lambda row: {"square": 1 / (row["n"] - 3)}, batch_size=5)
        .filter(lambda row: row["n"] < limit)
        .flat_map(halve)
        .filter(lambda row: row["half"] != 0)
        .map(lambda row, index: {"index": index}, with_indices=True, remove_columns="square")
    )
    ran = MapperRun(tmp_path, chain, batch_size=5)
    assert ran.output() == [{"half": n // 2 * sign, "index": n} for n in (2, 5, 6, 7) for sign in (1, -1)]
    assert ran.failed_rows == {3: "ZeroDivisionError", 4: "KeyError"}
    assert [(outcome.rows_ok, outcome.rows_failed) for outcome in ran.outcomes] == [(3, 2), (5, 0)]


def test_batch_steps_of_a_chain_may_regroup_rows_where_they_say_so(tmp_path: Path) -> None:
    def pairs(columns: dict[str, Any]) -> Iterator[dict[str, Any]]:
        values = columns["n"]
        assert type(values).__name__ == "ndarray"
        yield {"sum": [int(values[:2].sum())]}
        yield {"sum": values[2:]}

    def picky(row: dict[str, Any], at: int) -> dict[str, Any]:
        if row["sum"] == at:
            raise ValueError("this sum")
        return {"double": row["sum"] * 2}

    chain = data_set().filter(lambda row: row["n"] != 3)
    chain = chain.map_batches(pairs, batch_format="numpy", rows="any")
    ran = MapperRun(tmp_path / "a", chain.map(picky, fn_kwargs={"at": -1}), batch_size=5)
    sums = [1, 2, 4, 11, 7, 8, 9]
    assert ran.output() == [{"sum": n, "double": 2 * n} for n in sums]
    failing = MapperRun(tmp_path / "b", chain.map(picky, fn_kwargs={"at": 4}), batch_size=5)
    assert [(bool(outcome.error), outcome.retry, outcome.final) for outcome in failing.outcomes] == [
        (True, False, False),
        (False, True, False),
    ]
    strict = data_set().map_batches(pairs, batch_format="numpy").map(picky, fn_kwargs={"at": -1})
    assert [
        (outcome.final, "returned 4 rows for a batch of 5" in outcome.error)
        for outcome in MapperRun(tmp_path / "c", strict, batch_size=5).outcomes
    ] == [(True, True)] * 2


def test_the_method_determines_the_output_columns(tmp_path: Path) -> None:
    class Next:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, data: Any) -> Any:  # noqa: ANN401
            is_batch = isinstance(data, list)
            results = [{"m": row["n"] + self.by} for row in (data if is_batch else [data])]
            return results if is_batch else results[0]

    merged_rows, replaced_rows = [{"n": n, "m": n + 1} for n in range(10)], [{"m": n + 1} for n in range(10)]
    options: dict[str, Any] = {"fn_constructor_kwargs": {"by": 1}}
    assert MapperRun(tmp_path / "a", data_set().map(Next, **options)).output() == merged_rows
    assert MapperRun(tmp_path / "b", data_set().map(Next, batched=True, **options)).output() == merged_rows
    assert MapperRun(tmp_path / "c", data_set().map_batches(Next, **options)).output() == replaced_rows
    assert MapperRun(tmp_path / "d", data_set().flat_map(lambda row: [{"m": row["n"] + 1}])).output() == replaced_rows
    assert MapperRun(tmp_path / "e", data_set().filter(lambda row: row["n"] != 0)).output() == ROWS[1:]


def test_async_functions_and_generators_are_steps(tmp_path: Path) -> None:
    async def twice(row: dict[str, Any]) -> Any:  # noqa: ANN401
        import asyncio

        for _ in range(2):
            await asyncio.sleep(0)
            yield row

    async def even(row: dict[str, Any]) -> bool:
        return row["n"] % 2 == 0

    async def batches(rows: list[dict[str, Any]]) -> Any:  # noqa: ANN401
        yield rows[:1]
        yield rows[1:]

    chain = data_set().filter(even).flat_map(twice).map_batches(batches)
    assert MapperRun(tmp_path, chain).output() == [{"n": n} for n in (0, 0, 2, 2, 4, 4, 6, 6, 8, 8)]


def test_a_row_is_tried_again_after_the_errors_that_the_job_names(tmp_path: Path) -> None:
    tried: dict[int, int] = {}

    def flaky(row: dict[str, Any]) -> dict[str, Any]:
        tried[row["n"]] = tried.get(row["n"], 0) + 1
        if row["n"] == 1 and tried[1] < 3:
            raise ConnectionResetError("for a moment")
        if row["n"] in (2, 3):
            raise TimeoutError("always") if row["n"] == 2 else KeyError("bad row")
        return {"tries": tried[row["n"]]}

    options: dict[str, Any] = {"kind": "row", "limits": {"backoff_s": 0.0, "max_retries": 2}}
    mapper = serialize_function(flaky, kind="row")
    assert mapper  # it is pickled, and `tried` with it: the counts of the copy are in the results
    ran = MapperRun(tmp_path, flaky, retry_on=["ConnectionError", "builtins.TimeoutError"], rows=ROWS[:4], **options)
    assert ran.output() == [{"n": 0, "tries": 1}, {"n": 1, "tries": 3}]
    assert ran.failed_rows == {2: "TimeoutError", 3: "KeyError"}
    once = MapperRun(tmp_path / "once", flaky, rows=ROWS[:4], **options)
    assert once.failed_rows == {1: "ConnectionResetError", 2: "TimeoutError", 3: "KeyError"}


@pytest.mark.parametrize(
    ("error", "retry_on", "retried"),
    [
        ("ValueError", None, False),
        ("KeyError", None, False),
        ("ConnectionError", None, True),
        ("RuntimeError", None, True),
        ("ValueError", ["ValueError"], True),
        ("KeyError", ["LookupError"], True),
        ("ConnectionError", [], False),
        ("ConnectionError", ["OSError"], True),
    ],
)
def test_a_batch_is_tried_again_unless_its_rows_raise_the_same_again(
    error: str, retry_on: list[str] | None, retried: bool, tmp_path: Path
) -> None:
    def fails(rows: list[dict[str, Any]], error: str) -> None:
        import builtins

        raise getattr(builtins, error)("no")

    ran = MapperRun(tmp_path, fails, kind="batch", kwargs={"error": error}, retry_on=retry_on, rows=ROWS[:3])
    assert [(bool(outcome.error), outcome.retry) for outcome in ran.outcomes] == [(True, retried)]


class OnOneLoop:
    """Holds objects that belong to the event loop of its construction."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.get_running_loop()
        self.semaphore = asyncio.Semaphore(1)
        self.ticks = 0
        self.ticking = asyncio.create_task(self.tick(), name="ticking")

    async def tick(self) -> None:
        import asyncio

        while True:
            await asyncio.sleep(0)
            self.ticks += 1

    async def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import asyncio

        async with self.semaphore:
            await asyncio.sleep(0.001)
        return {"same": asyncio.get_running_loop() is self.loop, "ticks": self.ticks}


def test_an_object_that_belongs_to_an_event_loop_lasts_for_a_workers_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        ran = MapperRun(tmp_path, OnOneLoop, kind="row", serializer="cloudpickle")
    assert [row["same"] for row in ran.output()] == [True] * 10 and not ran.failed_rows
    assert [row["ticks"] for row in ran.output()][-1] > 0
    assert caplog.messages == [
        "the function ended with 1 pending asyncio tasks, which are cancelled: ticking (OnOneLoop.tick)"
    ]


def test_every_kind_of_asynchronous_function_runs_on_the_one_loop(tmp_path: Path) -> None:
    data = (
        data_set()
        .map(lambda row: {"sync": True})
        .map(_loop_of_row)
        .filter(_has_loop)
        .flat_map(_loop_of_rows)
        .map_batches(_loop_of_batch, rows="any")
        .map_batches(_loops_of_batch, rows="any", batch_format="rows")
    )
    rows = MapperRun(tmp_path, data).output()
    assert len(rows) == 10
    assert len({loop for row in rows for loop in row["loops"]}) == 1
    assert all(len(row["loops"]) == 4 for row in rows)


def _running() -> int:
    import asyncio

    return id(asyncio.get_running_loop())


async def _loop_of_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"loops": [_running()]}


async def _has_loop(row: dict[str, Any]) -> bool:
    return row["loops"] == [_running()]


async def _loop_of_rows(row: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield {"loops": [*row["loops"], _running()]}


async def _loop_of_batch(rows: Rows) -> Rows:
    return [{"loops": [*row["loops"], _running()]} for row in rows]


async def _loops_of_batch(rows: Rows) -> AsyncIterator[Rows]:
    yield [{"loops": [*row["loops"], _running()]} for row in rows]


def test_an_async_loop_that_is_called_again_has_the_same_event_loop_and_none_of_its_old_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @batch.remote_function
    async def gen() -> None:
        import asyncio

        from tinsmith import batch

        old = asyncio.create_task(asyncio.sleep(1000), name="old")
        await asyncio.sleep(0)
        tasks = len(asyncio.all_tasks())
        async for rows in batch.load():
            if rows[0]["n"] == 3:
                raise RuntimeError("three")
            loop = id(asyncio.get_running_loop())
            batch.save_results([{"loop": loop, "tasks": tasks, "done": old.done()} for row in rows])

    with caplog.at_level("WARNING"):
        rows = MapperRun(tmp_path, gen).output()
    assert len(rows) == 7 and len({row["loop"] for row in rows}) == 1
    assert {row["tasks"] for row in rows} == {2}
    assert len(caplog.messages) == 2 and all("old (sleep)" in message for message in caplog.messages)


def test_what_a_function_left_open_is_closed_on_its_event_loop(tmp_path: Path) -> None:
    @batch.remote_function
    async def gen(path: str) -> None:
        import asyncio
        from pathlib import Path

        from tinsmith import batch

        async def numbers():
            try:
                while True:
                    yield 1
            finally:
                await asyncio.sleep(0)
                Path(path).write_text("closed")

        opened = numbers()
        async for rows in batch.load():
            batch.save_results([{"n": await anext(opened)} for row in rows])
        asyncio.get_running_loop().opened = opened  # type: ignore[attr-defined]  not collected before the end

    assert len(MapperRun(tmp_path, gen, kwargs={"path": f"{tmp_path}/mark"}).output()) == 10
    assert (tmp_path / "mark").read_text() == "closed"


def test_a_synchronous_function_may_run_an_event_loop_of_its_own(tmp_path: Path) -> None:
    def own(row: dict[str, Any]) -> dict[str, Any]:
        import asyncio

        return {"own": asyncio.run(asyncio.sleep(0, 1))}

    data = data_set().map(_loop_of_row).map(own)
    assert [row["own"] for row in MapperRun(tmp_path, data).output()] == [1] * 10
