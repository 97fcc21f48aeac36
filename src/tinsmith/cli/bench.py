"""`tinsmith bench`: compares Tinker-compatible servers on the same work.

The client is the official SDK or, for servers and keys that the SDK does not support, the JSON bodies of earlier SDKs.
Runs of a measure are interleaved across the servers, so that other load affects all of them equally. Figures are
medians, and ratios are relative to the first server. A measure that a server fails shows its error in the table. The
SDK is imported only when this command runs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from tinsmith.auth import KEY_PREFIX, TOKEN_PREFIX
from tinsmith.errors import SettingsError, TinsmithError

if TYPE_CHECKING:
    import tinker

DATUM_TOKENS = 32
BATCH, BATCH_TOKENS = 8, 128
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 32
VOCAB = 400
"""Upper bound of token ids, which every vocabulary contains."""
WARM_UP = 2
HEALTH_TIMEOUT_S = 10.0
"""Timeout of a server's health check; the SDK would retry for minutes."""


POLL_S = 0.005
MAX_ERROR_CHARS = 400
"""Most characters of an error to show."""

DIALECTS = ("sdk", "json")


class BenchError(TinsmithError):
    """A server failed a measure; the message is its reason."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A server's URL, an API key, a base model (None: the first), and one of DIALECTS (None: json for keys that the SDK
    does not send).
    """

    url: str
    key: str
    model: str | None = None
    dialect: str | None = None

    @property
    def takes_json(self) -> bool:
        return (self.dialect or ("sdk" if self.key.startswith((KEY_PREFIX, TOKEN_PREFIX)) else "json")) == "json"


def build_targets(
    urls: Sequence[str], models: Sequence[str], keys: Sequence[str], dialects: Sequence[str] = ()
) -> list[BenchTarget]:
    """Make a target for each URL. Other flags are given once, or once per URL. Raises SettingsError."""
    if unknown := [name for name in dialects if name not in DIALECTS]:
        raise SettingsError(f"--dialect is {unknown[0]!r}; it must be {' or '.join(DIALECTS)}")
    for flag, values in (("--model", models), ("--key", keys), ("--dialect", dialects)):
        if len(values) not in (0, 1, len(urls)):
            raise SettingsError(
                f"{flag} is given {len(values)} times and --url {len(urls)}; give one for all, or one for each"
            )
    models_and_dialects = [
        [*flags] if len(flags) == len(urls) else [*flags, None][:1] * len(urls) for flags in (models, dialects)
    ]
    target_keys = [*keys] if len(keys) == len(urls) else [*keys][:1] * len(urls)
    return [BenchTarget(*fields) for fields in zip(urls, target_keys, *models_and_dialects, strict=True)]


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of work. `run` returns its number of tokens. The figure is tokens per second or milliseconds."""

    name: str
    run: Callable[[BenchClient], int]
    is_rate: bool = False

    @property
    def unit(self) -> str:
        return "tokens/s" if self.is_rate else "ms"


@dataclass(slots=True)
class Figure:
    """The figures of all runs of one measure on one server, or the error."""

    values: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def value(self) -> float | None:
        return None if self.error or not self.values else statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure, with a figure for each server."""

    measure: Measure
    figures: tuple[Figure, ...]

    def ratio(self, index: int) -> float | None:
        """The server's speed relative to the first server's."""
        first, value = self.figures[0].value, self.figures[index].value
        if first is None or value is None:
            return None
        return value / first if self.measure.is_rate else first / value

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


RUN_METADATA = {"name": "tinsmith bench"}
"""Its name in lists of runs."""


class BenchClient(ABC):
    """A session on one server, and the measured work. Each measure returns its number of tokens."""

    def __init__(self, target: BenchTarget, rank: int, patience_s: float) -> None:
        self.target = target
        self.model = target.model or _first_model(target)
        self._rank = rank
        self._patience_s = patience_s
        self._seeds = itertools.count()

    @abstractmethod
    def train(self, rows: Sequence[np.ndarray], *, forward_only: bool = False) -> None:
        """Run passes over sequences with next-token targets, and an optimizer step unless `forward_only`."""

    @abstractmethod
    def sample(self, prompts: Sequence[np.ndarray], new: int, *, published: bool = False) -> int:
        """Sample at most `new` tokens for all prompts at once, from the current trained weights if `published`."""

    def forward(self) -> int:
        self.train([self._tokens(DATUM_TOKENS + 1)], forward_only=True)
        return DATUM_TOKENS

    def step(self) -> int:
        self.train([self._tokens(DATUM_TOKENS + 1)])
        return DATUM_TOKENS

    def batch(self) -> int:
        self.train([self._tokens(BATCH_TOKENS + 1) for _ in range(BATCH)])
        return BATCH * BATCH_TOKENS

    def first_token(self) -> int:
        return self.sample([self._tokens(PROMPT_TOKENS)], 1)

    def publish(self) -> int:
        return self.sample([self._tokens(PROMPT_TOKENS)], 1, published=True)

    def samples(self) -> int:
        return self.sample([self._tokens(PROMPT_TOKENS) for _ in range(SAMPLES)], NEW_TOKENS)

    def _tokens(self, length: int) -> np.ndarray:
        """Draw new tokens each time, so that no cache has them."""
        return np.random.default_rng(next(self._seeds)).integers(1, VOCAB, length)


class SdkClient(BenchClient):
    """A client that uses the official SDK."""

    def __init__(self, service: tinker.ServiceClient, target: BenchTarget, rank: int, patience_s: float) -> None:
        super().__init__(target, rank, patience_s)
        self._service = service

    @cached_property
    def training(self) -> tinker.TrainingClient:
        created = self._service.create_lora_training_client(self.model, rank=self._rank, user_metadata=RUN_METADATA)
        return created.result(timeout=self._patience_s)

    @cached_property
    def sampling(self) -> tinker.SamplingClient:
        return self._service.create_sampling_client(base_model=self.model).result(timeout=self._patience_s)

    def train(self, rows: Sequence[np.ndarray], *, forward_only: bool = False) -> None:
        from tinker import types

        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(tokens[1:]),
                    "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
                },
            )
            for tokens in rows
        ]
        if forward_only:
            self.training.forward(data, "cross_entropy").result(timeout=self._patience_s)
            return
        passed = self.training.forward_backward(data, "cross_entropy")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result(timeout=self._patience_s)
        stepped.result(timeout=self._patience_s)

    def sample(self, prompts: Sequence[np.ndarray], new: int, *, published: bool = False) -> int:
        from tinker import types

        sampler = self.sampling
        if published:
            sampler = self.training.save_weights_and_get_sampling_client().result(timeout=self._patience_s)
        params = types.SamplingParams(max_tokens=new, temperature=1.0)
        waiting = [sampler.sample(types.ModelInput.from_ints(prompt.tolist()), 1, params) for prompt in prompts]
        answers = [future.result(timeout=self._patience_s) for future in waiting]
        return sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)


class JsonClient(BenchClient):
    """A client that sends the JSON bodies of earlier SDKs, which other implementations accept. The key is sent as
    X-API-Key and as a bearer token. Raises BenchError.
    """

    def __init__(self, target: BenchTarget, rank: int, patience_s: float) -> None:
        super().__init__(target, rank, patience_s)
        self._http = _http(target, patience_s)
        self._threads = ThreadPoolExecutor(SAMPLES)
        self._passes, self._drawn, self._sessions = itertools.count(1), itertools.count(), itertools.count()

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()

    @cached_property
    def _session(self) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.6.0", "type": "create_session"}
        return self._post("create_session", body)["session_id"]

    @cached_property
    def _model_id(self) -> str:
        body = {"session_id": self._session, "model_seq_id": 0, "base_model": self.model, "type": "create_model"}
        body["user_metadata"] = RUN_METADATA
        created = self._post("create_model", body | {"lora_config": {"rank": self._rank}})
        result = self._result(created["request_id"])
        return str(created.get("model_id") or result["model_id"])

    @cached_property
    def _base_sampler(self) -> dict[str, object]:
        return self._sampler({"base_model": self.model})

    def _sampler(self, whose: dict[str, object]) -> dict[str, object]:
        """Return the fields that name the weights of a sample: a sampling session or, without sessions, the weights."""
        body = {"session_id": self._session, "sampling_session_seq_id": next(self._sessions), **whose}
        answer = self._http.post("create_sampling_session", json=body | {"type": "create_sampling_session"})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return whose
        return {"sampling_session_id": _read(answer)["sampling_session_id"]}

    def train(self, rows: Sequence[np.ndarray], *, forward_only: bool = False) -> None:
        kind = "forward" if forward_only else "forward_backward"
        batch = {"data": [_json_datum(tokens.tolist()) for tokens in rows], "loss_fn": "cross_entropy"}
        request_ids = [self._submit(kind, {f"{kind}_input": batch})]
        if not forward_only:
            adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
            request_ids.append(self._submit("optim_step", {"adam_params": adam}))
        for request_id in request_ids:
            self._result(request_id)

    def sample(self, prompts: Sequence[np.ndarray], new: int, *, published: bool = False) -> int:
        whose = self._base_sampler
        if published:
            saved = self._result(self._submit("save_weights_for_sampler", {"path": f"bench-{next(self._sessions)}"}))
            whose = self._sampler({"model_path": saved["path"]})

        def draw(prompt: np.ndarray) -> int:
            chunks = [{"type": "encoded_text", "tokens": prompt.tolist()}]
            params = {"max_tokens": new, "temperature": 1.0}
            body = {"prompt": {"chunks": chunks}, "num_samples": 1, "sampling_params": params, "type": "sample"}
            submission = self._post("asample", body | whose | {"seq_id": next(self._drawn)})
            return sum(len(sequence["tokens"]) for sequence in self._result(submission["request_id"])["sequences"])

        return sum(self._threads.map(draw, prompts))

    def _submit(self, kind: str, body: dict[str, object]) -> str:
        body |= {"model_id": self._model_id, "seq_id": next(self._passes), "type": kind}
        return str(self._post(kind, body)["request_id"])

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return _read(self._http.post(path, json=body))

    def _result(self, request_id: str) -> dict[str, Any]:
        """Fetch a result from any known server, with long or short polls, with or without a status object."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            answer = self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code == httpx.codes.OK and "json" not in answer.headers.get("content-type", ""):
                answer = self._http.get(f"retrieve_future/{request_id}")  # this path returns JSON instead of protobuf
            result = {} if answer.status_code == httpx.codes.REQUEST_TIMEOUT else _read(answer)
            status = result.get("status")
            if result.get("error") or status in ("failed", "error"):
                raise BenchError(f"{request_id} failed: {result.get('error') or result}"[:MAX_ERROR_CHARS])
            if result and result.get("type") != "try_again" and status not in ("pending", "processing"):
                return result["result"] if "result" in result and status == "completed" else result
            time.sleep(POLL_S)
        raise BenchError(f"{request_id} had no result within {self._patience_s:g} s")


def _json_datum(tokens: list[int]) -> dict[str, object]:
    count = len(tokens) - 1
    inputs = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [count]},
        "weights": {"data": [1.0] * count, "dtype": "float32", "shape": [count]},
    }
    chunks = [{"type": "encoded_text", "tokens": tokens[:-1]}]
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise BenchError(f"{answer.request.url.path} returned {answer.status_code}: {answer.text}"[:MAX_ERROR_CHARS])
    return answer.json()


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
    """Open a session on each server for the duration of the block. Raises SettingsError."""
    with ExitStack() as sessions:
        clients: list[BenchClient] = []
        for target in targets:
            _require_server(target)
            if target.takes_json:
                clients.append(sessions.enter_context(closing(JsonClient(target, rank, patience_s))))
            else:
                service = sessions.enter_context(_service(target))
                clients.append(SdkClient(service, target, rank, patience_s))
        yield clients


def _service(target: BenchTarget) -> tinker.ServiceClient:
    try:
        import tinker
    except ModuleNotFoundError:
        raise SettingsError(
            "tinsmith bench needs the SDK: pip install 'tinsmith[demo]', or pass --dialect json"
        ) from None
    return tinker.ServiceClient(base_url=target.url, api_key=target.key)


def compare(clients: Sequence[BenchClient], runs: int) -> Iterator[Comparison]:
    """Yield the measures as they complete."""
    for measure in MEASURES:
        figures = tuple(Figure() for _ in clients)
        for round_index in range(WARM_UP + runs):
            for client, figure in zip(clients, figures, strict=True):
                if figure.error is None:
                    _run_measure(measure, client, figure, counts=round_index >= WARM_UP)
        yield Comparison(measure, figures)


def _run_measure(measure: Measure, client: BenchClient, figure: Figure, *, counts: bool) -> None:
    started = time.perf_counter()
    try:
        tokens = measure.run(client)
    except Exception as error:  # noqa: BLE001  the SDK may raise anything for the response of another server
        figure.error = f"{type(error).__name__}: {error}"
        return
    seconds = time.perf_counter() - started
    if counts:
        figure.values.append(tokens / seconds if measure.is_rate else 1000 * seconds)


def _require_server(target: BenchTarget) -> None:
    try:
        httpx.get(f"{target.url.rstrip('/')}/api/v1/healthz", timeout=HEALTH_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise SettingsError(
            f"no server responds at {target.url} ({error}); start one with `tinsmith serve`, or pass --url"
        ) from None


def _first_model(target: BenchTarget) -> str:
    try:
        with _http(target, HEALTH_TIMEOUT_S) as http:
            served = _read(http.get("get_server_capabilities")).get("supported_models") or []
    except BenchError as error:
        raise SettingsError(f"{target.url} names no base model ({error}); give one with --model") from None
    names = [model.get("model_name") if isinstance(model, dict) else model for model in served]
    if not (names and names[0]):
        raise SettingsError(f"{target.url} names no base model; give one with --model")
    return str(names[0])


def _http(target: BenchTarget, timeout_s: float) -> httpx.Client:
    headers = {"X-API-Key": target.key, "Authorization": f"Bearer {target.key}"}
    return httpx.Client(base_url=f"{target.url.rstrip('/')}/api/v1/", headers=headers, timeout=timeout_s)


def run_bench(output: Console, targets: Sequence[BenchTarget], *, runs: int, rank: int, patience_s: float) -> bool:
    """Show a table that grows row by row. Returns whether no measure failed. Raises SettingsError."""
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
    """Run the benchmark and return plain values. Raises SettingsError."""
    with clients_of(targets, rank=rank, patience_s=patience_s) as clients:
        rows = list(compare(clients, runs))
        is_complete = not any(figure.error for row in rows for figure in row.figures)
        return is_complete, [row.as_json(clients) for row in rows]


def _table(clients: Sequence[BenchClient]) -> Table:
    table = Table("what", "unit", box=None, pad_edge=False)
    for index, client in enumerate(clients):
        table.add_column(escape(f"{client.target.url}\n{client.model}"), justify="right", overflow="fold")
        if index:
            table.add_column("ratio", justify="right")
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
