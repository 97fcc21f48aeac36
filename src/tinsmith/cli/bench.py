"""`tinsmith bench`: the same work, by the official SDK, on any Tinker-compatible servers side by side.

Runs of a measure are interleaved across the servers, so that other load affects all of them alike. Figures are medians,
and ratios are to the first server. An operation that a server cannot do shows its error in the table. The SDK is
imported when this runs and never by a server.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import httpx
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tinsmith.errors import SettingsError

if TYPE_CHECKING:
    import tinker
    from tinker import types

DATUM_TOKENS = 32
BATCH, BATCH_TOKENS = 8, 128
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 32
VOCAB = 400
"""Token ids stay below it: every model has as many."""
WARM_UP = 2
REACHED_S = 10.0
"""How long a server may take to answer its health check; the SDK would retry for minutes."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A server's address, a key, and one of its base models (None: the first)."""

    url: str
    key: str
    model: str | None = None


def targets_of(urls: Sequence[str], models: Sequence[str], keys: Sequence[str]) -> list[BenchTarget]:
    """A server for each URL; models and keys are given once, or for each server. Raises SettingsError."""
    for flag, values in (("--model", models), ("--key", keys)):
        if len(values) not in (0, 1, len(urls)):
            raise SettingsError(
                f"{flag} is given {len(values)} times and --url {len(urls)}; give one for all, or one for each"
            )
    every_model = [*models] if len(models) == len(urls) else [*models, None][:1] * len(urls)
    every_key = [*keys] if len(keys) == len(urls) else [*keys][:1] * len(urls)
    return [BenchTarget(url, key, model) for url, key, model in zip(urls, every_key, every_model, strict=True)]


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of work; `run` returns its number of tokens. Its figure is tokens per second, or else milliseconds."""

    name: str
    run: Callable[[BenchClient], int]
    is_rate: bool = False

    @property
    def unit(self) -> str:
        return "tokens/s" if self.is_rate else "ms"


@dataclass(slots=True)
class Figure:
    """The figure of each run of one measure on one server, or the error."""

    values: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def value(self) -> float | None:
        return None if self.error or not self.values else statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure, with a figure for each server in order."""

    measure: Measure
    figures: tuple[Figure, ...]

    def ratio(self, index: int) -> float | None:
        """The server's speed relative to the first server's."""
        first, own = self.figures[0].value, self.figures[index].value
        if first is None or own is None:
            return None
        return own / first if self.measure.is_rate else first / own

    def as_json(self, clients: Sequence[BenchClient]) -> dict[str, object]:
        servers = [
            {
                "url": client.target.url,
                "model": client.model,
                "value": figure.value,
                "least": min(figure.values, default=None),
                "most": max(figure.values, default=None),
                "ratio": self.ratio(index),
                "error": figure.error,
            }
            for index, (client, figure) in enumerate(zip(clients, self.figures, strict=True))
        ]
        return {"measure": self.measure.name, "unit": self.measure.unit, "servers": servers}


class BenchClient:
    """A session on one server, and the work that is measured there."""

    def __init__(self, service: tinker.ServiceClient, target: BenchTarget, rank: int, patience_s: float) -> None:
        self.target = target
        self.model = target.model or _first_model(target)
        self._service = service
        self._rank = rank
        self._patience_s = patience_s
        self._seeds = itertools.count()

    @cached_property
    def training(self) -> tinker.TrainingClient:
        created = self._service.create_lora_training_client(self.model, rank=self._rank)
        return created.result(timeout=self._patience_s)

    @cached_property
    def sampling(self) -> tinker.SamplingClient:
        return self._service.create_sampling_client(base_model=self.model).result(timeout=self._patience_s)

    def forward(self) -> int:
        self.training.forward([self._datum(DATUM_TOKENS)], "cross_entropy").result(timeout=self._patience_s)
        return DATUM_TOKENS

    def step(self) -> int:
        return self._train(1, DATUM_TOKENS)

    def batch(self) -> int:
        return self._train(BATCH, BATCH_TOKENS)

    def first_token(self) -> int:
        return self._sample(self.sampling, 1, 1)

    def publish(self) -> int:
        published = self.training.save_weights_and_get_sampling_client().result(timeout=self._patience_s)
        return self._sample(published, 1, 1)

    def samples(self) -> int:
        return self._sample(self.sampling, SAMPLES, NEW_TOKENS)

    def _train(self, count: int, length: int) -> int:
        from tinker import types

        passed = self.training.forward_backward([self._datum(length) for _ in range(count)], "cross_entropy")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result(timeout=self._patience_s)
        stepped.result(timeout=self._patience_s)
        return count * length

    def _sample(self, sampler: tinker.SamplingClient, count: int, new: int) -> int:
        from tinker import types

        params = types.SamplingParams(max_tokens=new, temperature=1.0)
        prompts = [types.ModelInput.from_ints(self._tokens(PROMPT_TOKENS).tolist()) for _ in range(count)]
        waiting = [sampler.sample(prompt, 1, params) for prompt in prompts]
        answers = [future.result(timeout=self._patience_s) for future in waiting]
        return sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)

    def _datum(self, length: int) -> types.Datum:
        from tinker import types

        tokens = self._tokens(length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)

    def _tokens(self, length: int) -> np.ndarray:
        """Different tokens each time, so that no cache has them."""
        return np.random.default_rng(next(self._seeds)).integers(1, VOCAB, length)


MEASURES = (
    Measure("forward, one datum", BenchClient.forward),
    Measure("forward_backward + optim_step", BenchClient.step),
    Measure("sample, one token", BenchClient.first_token),
    Measure("publish + first token", BenchClient.publish),
    Measure(f"training, {BATCH} x {BATCH_TOKENS}", BenchClient.batch, is_rate=True),
    Measure(f"sampling, {SAMPLES} x {NEW_TOKENS}", BenchClient.samples, is_rate=True),
)


@contextmanager
def clients_of(targets: Sequence[BenchTarget], *, rank: int, patience_s: float) -> Iterator[list[BenchClient]]:
    """A session on each server while the block lasts. Raises SettingsError."""
    try:
        import tinker
    except ModuleNotFoundError:
        raise SettingsError("tinsmith bench works with the SDK: pip install 'tinsmith[demo]'") from None
    with ExitStack() as sessions:
        clients: list[BenchClient] = []
        for target in targets:
            _require_server(target)
            service = sessions.enter_context(tinker.ServiceClient(base_url=target.url, api_key=target.key))
            clients.append(BenchClient(service, target, rank, patience_s))
        yield clients


def compare(clients: Sequence[BenchClient], runs: int) -> Iterator[Comparison]:
    """One measure after the other, as they are taken."""
    for measure in MEASURES:
        figures = tuple(Figure() for _ in clients)
        for number in range(WARM_UP + runs):
            for client, figure in zip(clients, figures, strict=True):
                if figure.error is None:
                    _take(measure, client, figure, counts=number >= WARM_UP)
        yield Comparison(measure, figures)


def _take(measure: Measure, client: BenchClient, figure: Figure, *, counts: bool) -> None:
    started = time.perf_counter()
    try:
        tokens = measure.run(client)
    except Exception as error:  # noqa: BLE001  whatever the SDK makes of what this server answers
        figure.error = f"{type(error).__name__}: {error}"
        return
    seconds = time.perf_counter() - started
    if counts:
        figure.values.append(tokens / seconds if measure.is_rate else 1000 * seconds)


def _require_server(target: BenchTarget) -> None:
    try:
        httpx.get(f"{target.url.rstrip('/')}/api/v1/healthz", timeout=REACHED_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise SettingsError(
            f"no server answers at {target.url} ({error}); start one with `tinsmith serve`, or give its --url"
        ) from None


def _first_model(target: BenchTarget) -> str:
    import tinker

    served = tinker.RestClient(base_url=target.url, api_key=target.key).get_server_capabilities().result()
    for found in served.supported_models:
        if found.model_name:
            return found.model_name
    raise SettingsError(f"{target.url} names no base model; give one with --model")


def run_bench(output: Console, targets: Sequence[BenchTarget], *, runs: int, rank: int, patience_s: float) -> bool:
    """Show a table that grows row by row; whether every server did everything. Raises SettingsError."""
    errors: list[str] = []
    with clients_of(targets, rank=rank, patience_s=patience_s) as clients:
        table = _table(clients)
        with Live(table, console=output, auto_refresh=False) as live:
            for row in compare(clients, runs):
                table.add_row(row.measure.name, row.measure.unit, *_cells(row))
                live.refresh()
                errors += [
                    f"{row.measure.name} at {client.target.url}: {figure.error}"
                    for client, figure in zip(clients, row.figures, strict=True)
                    if figure.error
                ]
    for error in errors:
        output.print(f"[red]error:[/] {escape(error)}", highlight=False, soft_wrap=True)
    return not errors


def bench_as_json(
    targets: Sequence[BenchTarget], *, runs: int, rank: int, patience_s: float
) -> tuple[bool, list[dict[str, object]]]:
    """The same as plain values. Raises SettingsError."""
    with clients_of(targets, rank=rank, patience_s=patience_s) as clients:
        rows = list(compare(clients, runs))
        whole = not any(figure.error for row in rows for figure in row.figures)
        return whole, [row.as_json(clients) for row in rows]


def _table(clients: Sequence[BenchClient]) -> Table:
    table = Table("what", "unit", box=None, pad_edge=False)
    for index, client in enumerate(clients):
        table.add_column(escape(f"{client.target.url}\n{client.model}"), justify="right", overflow="fold")
        if index:
            table.add_column("times as good", justify="right")
    return table


def _cells(row: Comparison) -> Iterator[str]:
    for index, figure in enumerate(row.figures):
        if figure.value is None:
            yield "[red]error[/]"
        else:
            spread = f"{min(figure.values):,.1f} - {max(figure.values):,.1f}"
            yield f"{figure.value:,.1f} [dim]({spread})[/]"
        if index:
            ratio = row.ratio(index)
            yield "" if ratio is None else f"{ratio:.2f}"
