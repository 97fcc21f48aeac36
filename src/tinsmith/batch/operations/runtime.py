"""Operations on a worker: all rows of a batch run concurrently, with requests to the service on the pipe to the worker.

`Channel` is that pipe: requests go out as messages `{"asks": [...]}`, responses come back through `deliver_answers`, on
any thread. Requests of one event loop iteration share a message. Closing a channel fails its open requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tinsmith.batch.operations.base import Answer, RowOperation, RowRefusedError, SampleResponse
from tinsmith.batch.types import Assignment, Row
from tinsmith.errors import NotSupportedError

if TYPE_CHECKING:
    from tinsmith.chat.tokenizer import ModelTokenizer
    from tinsmith.types import ModelShape, TopK

Message = dict[str, Any]


class ClosedError(Exception):
    """The worker has ended, or is shutting down."""


class Channel:
    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._open: dict[int, Future[Message]] = {}
        self._last = 0
        self._closed = False
        self._outgoing: list[Message] = []
        self._shapes: dict[str, ModelShape] = {}
        self._texts: dict[str, ModelTokenizer] = {}
        self._load_lock = threading.Lock()

    async def ask(self, assignment: Assignment, request: Message) -> Message:
        """Send a request and wait for its response. Raises RowRefusedError, ClosedError."""
        future: Future[Message] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the worker is shutting down")
            self._last += 1
            ask_id = self._last
            self._open[ask_id] = future
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        attempt = {"batch_idx": assignment.batch_idx, "attempt_id": assignment.attempt_id}
        self._outgoing.append({"number": ask_id, **attempt, **request})
        response = await asyncio.wrap_future(future)
        if "refused" in response:
            raise RowRefusedError(response["refused"])
        return response["answer"]

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._send({"asks": outgoing})

    def deliver_answers(self, answers: Sequence[Message]) -> None:
        """Hand responses to their requests, on the reading thread. A response to a cancelled request is dropped."""
        for answer in answers:
            with self._lock:
                future = self._open.pop(int(answer["number"]), None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(answer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            futures, self._open = list(self._open.values()), {}
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the worker is shutting down"))

    async def shape(self, assignment: Assignment, model: str) -> ModelShape:
        """The shape of a model's base, requested once. Raises RowRefusedError."""
        if model not in self._shapes:
            from tinsmith.types import ModelShape, VisionShape

            response = await self.ask(assignment, {"verb": "model", "payload": {"model": model}})
            vision = response["shape"]["vision"]
            shape_fields = response["shape"] | {"vision": vision and VisionShape(**vision)}
            self._shapes[model] = ModelShape(**shape_fields)
        return self._shapes[model]

    async def text(self, assignment: Assignment, model: str) -> ModelTokenizer:
        """The tokenizer and chat template of a model's base, loaded once."""
        shape = await self.shape(assignment, model)
        return self._texts.get(shape.name) or await asyncio.to_thread(self._load_text, shape)

    def _load_text(self, shape: ModelShape) -> ModelTokenizer:
        from tinsmith.chat.tokenizer import ModelTokenizer

        with self._load_lock:
            if shape.name not in self._texts:
                text = ModelTokenizer(shape)
                with contextlib.suppress(NotSupportedError):  # raised again where it is needed
                    text.backend_tokenizer.get_vocab_size()
                self._texts[shape.name] = text
            return self._texts[shape.name]


class ChannelRowService:
    """The `RowService` of one row in one step."""

    def __init__(self, channel: Channel, assignment: Assignment, row_idx: int, step: int) -> None:
        self._channel = channel
        self._assignment = assignment
        self._step = step
        self.row_idx = row_idx
        self.tokens_in = self.tokens_out = 0

    def count(self, tokens_in: int, tokens_out: int) -> None:
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out

    async def ask(self, verb: str, payload: Mapping[str, Any], key: str = "") -> dict[str, Any]:
        name = f"{self._step}.{key}" if key else str(self._step)
        request = {"verb": verb, "row_idx": self.row_idx, "key": name, "payload": payload}
        return await self._channel.ask(self._assignment, request)

    async def sample(self, model: str, request: Mapping[str, Any], key: str = "") -> SampleResponse:
        answer = await self.ask("sample", {"model": model, "request": request}, key)
        response = parse_sample_response(base64.b64decode(answer["result"]))
        chunks = request["prompt"]["chunks"]
        num_prompt_tokens = sum(
            len(chunk["tokens"]) if "tokens" in chunk else chunk["expected_tokens"] for chunk in chunks
        )
        self.count(num_prompt_tokens, sum(len(sequence.tokens) for sequence in response.sequences))
        return response

    async def text(self, model: str) -> ModelTokenizer:
        return await self._channel.text(self._assignment, model)

    async def context(self, model: str) -> int:
        return (await self._channel.shape(self._assignment, model)).max_context_length


def parse_sample_response(body: bytes) -> SampleResponse:
    """Parse the service's wire bytes of a sample."""
    from tinsmith.wire.sampling import read_sample_result

    result = read_sample_result(body, "")
    sequences = [
        Answer(sequence.tokens_T.tolist(), sequence.logprobs_T.tolist(), sequence.stop_reason, _topk(sequence.topk))
        for sequence in result.sequences
    ]
    scores = None
    if result.prompt_logprobs_T is not None:
        scores = [None if value != value else value for value in result.prompt_logprobs_T.tolist()]
    return SampleResponse(sequences, scores, _topk(result.topk_prompt))


def _topk(topk: TopK | None) -> list[list[tuple[int, float]]] | None:
    from tinsmith.types import EMPTY_LOGPROB

    if topk is None:
        return None
    rows = zip(topk.token_ids_Tk.tolist(), topk.logprobs_Tk.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != EMPTY_LOGPROB] for row in rows]


async def answer_rows(
    steps: Sequence[RowOperation],
    rows: Sequence[Row],
    indices: Sequence[int],
    assignment: Assignment,
    channel: Channel,
    first_step: int,
) -> tuple[list[Row | Exception], tuple[int, int]]:
    """The result or error of each row, and the tokens of all. The index of the first step is part of the names of
    requests: two operations of a job must not share it."""
    results = await asyncio.gather(
        *(
            _answer_row(steps, row, index, assignment, channel, first_step)
            for row, index in zip(rows, indices, strict=True)
        )
    )
    tokens = sum(tokens_in for _, (tokens_in, _) in results), sum(tokens_out for _, (_, tokens_out) in results)
    return [result for result, _ in results], tokens


async def _answer_row(
    steps: Sequence[RowOperation], row: Row, index: int, assignment: Assignment, channel: Channel, first_step: int
) -> tuple[Row | Exception, tuple[int, int]]:
    """Run one row through all steps; returns its result or error, and its tokens, which also count for a failed row."""
    tokens_in = tokens_out = 0
    result: Row | Exception = row
    for step_idx, step in enumerate(steps, first_step):
        service = ChannelRowService(channel, assignment, index, step_idx)
        try:
            result = await step.answer(result, service)
        except ClosedError:
            raise  # not the row's fault
        except Exception as error:  # noqa: BLE001 (any error fails the row)
            result = error
        tokens_in += service.tokens_in
        tokens_out += service.tokens_out
        if isinstance(result, Exception):
            break
    return result, (tokens_in, tokens_out)
