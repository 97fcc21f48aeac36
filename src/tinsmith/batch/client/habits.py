"""Options that users of Ray Data and of Hugging Face's `datasets` pass by habit: as our own where they mean the same,
and for each of the others what to use in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinsmith.errors import NotSupportedError

ADVICE = {
    "accelerator_type": "a pool has its accelerators: pool=",
    "cache_file_name": "results are in the output; if_exists='resume' takes up an earlier run",
    "compute": "concurrency=MOST, or (LEAST, MOST)",
    "desc": "name= is shown in lists",
    "disable_nullable": "a missing value is null; fill it in the function",
    "drop_last_batch": "every row is mapped; limit(ROWS) leaves the last ones out",
    "expr": "give a function of a row",
    "features": "types follow from the rows; convert the values in the function",
    "input_columns": "the function gets the row; take its columns there, or use batch_format='columns'",
    "keep_in_memory": "results are in the output; batch.load(PATH) reads them",
    "load_from_cache_file": "if_exists='resume' takes up an earlier run",
    "max_restarts": "limits={'max_retries': TRIES}",
    "max_retries": "limits={'max_retries': TRIES}",
    "max_task_retries": "limits={'max_retries': TRIES}",
    "new_fingerprint": "if_exists='resume' recognizes the function by its code",
    "num_rows_per_batch": "batch_size=",
    "num_workers": "concurrency=",
    "preserve_order": "an output is always in input order; Job.stream(order='any') is not",
    "ray_remote_args_fn": "num_cpus=, num_gpus=, memory= or resources=",
    "retry_exceptions": "retry_on=",
    "runtime_env": "env=, python= or activate_env=",
    "scheduling_strategy": "resources=, or a pool: pool=",
    "udf_modifying_row_count": "rows='any'",
    "with_rank": "workers come and go, and have no rank; a class is made once on each",
    "writer_batch_size": "rows_per_file= of the writer, or batch_size=",
    "zero_copy_batch": "the function gets a copy, which it may change; leave it out",
}
"""What to use instead of an option that no method has."""


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `num_proc` and a `concurrency` of two numbers as `concurrency` and `min_concurrency`. Raises
    ValueError for two that contradict each other."""
    ours = dict(options)
    num_proc = ours.pop("num_proc", None)
    min_workers, max_workers = _least_and_most(ours.pop("concurrency", None))
    if num_proc is not None and max_workers not in (None, num_proc):
        raise ValueError(
            f"num_proc is {num_proc!r} and concurrency is {options['concurrency']!r}; they are one option: give one"
        )
    stated = ours.pop("min_concurrency", None)
    if None not in (stated, min_workers) and stated != min_workers:
        raise ValueError(
            f"min_concurrency is {stated!r} and concurrency is {options['concurrency']!r}; give the minimum once"
        )
    min_workers = min_workers if stated is None else stated
    values = {
        "concurrency": num_proc if max_workers is None else max_workers,
        "min_concurrency": None if min_workers == 1 else min_workers,
    }
    return ours | {name: value for name, value in values.items() if value is not None}


def _least_and_most(concurrency: object) -> tuple[Any, Any]:
    """The numbers of a pair, or no least number. Anything else is left to the check of the specification."""
    if not isinstance(concurrency, tuple | list):
        return None, concurrency
    are_counts = all(isinstance(count, int) and not isinstance(count, bool) for count in concurrency)
    if len(concurrency) != 2 or not are_counts or not 1 <= concurrency[0] <= concurrency[1]:
        raise ValueError(
            f"concurrency is {concurrency!r}; it must be MOST, or (LEAST, MOST): whole numbers from 1, the first not "
            "above the second"
        )
    return concurrency[0], concurrency[1]


def name_arguments(
    function: Callable[..., object], option: str, values: object, num_before: int, kwargs: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Arguments by position, which follow `num_before` others, by the names of their parameters, together with
    `kwargs`. Raises ValueError for those that have no name, or that `kwargs` has, too."""
    if values is None or values == () or values == []:
        return kwargs
    by_name = option.replace("args", "kwargs")
    if not isinstance(values, list | tuple):
        raise ValueError(f"{option} is {values!r}; it must be a list, or use {by_name}")
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_before : num_before + len(values)]
    except ValueError:  # of a builtin
        parameters = []
    if len(parameters) < len(values) or any(
        parameter.kind != parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
    ):
        name = getattr(function, "__name__", "the function")
        raise ValueError(f"{option} has {len(values)} values, and {name!r} has no names for all of them; use {by_name}")
    kwargs_by_name = dict(zip([parameter.name for parameter in parameters], values, strict=True))
    if twice := sorted(kwargs_by_name.keys() & {*(kwargs or {})}):
        raise ValueError(f"{option} and {by_name} both have {twice}; give each argument once")
    return {**kwargs_by_name, **(kwargs or {})}


def refuse_unknown(unknown: Sequence[str], option_names: Sequence[str]) -> None:
    """Raises NotSupportedError if there are options that no method has."""
    if unknown:
        advice = "".join(f". In place of {name}: {ADVICE[name]}" for name in unknown if name in ADVICE)
        raise NotSupportedError(f"map has no option {list(unknown)}; it has {list(option_names)}{advice}")
