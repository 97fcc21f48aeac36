"""Operations on a worker: all rows of a batch run concurrently, with requests to the service on the pipe to the worker.

`Channel` is that pipe: requests go out as messages `{"asks": [...]}`, responses come back through `answered`, on any
thread. Requests of one event loop iteration share a message. Closing a channel fails its open requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tinsmith.batch.operations.base import Answer, RowOperation, RowRefusedError, Sampled
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
        self._reading = threading.Lock()

    async def ask(self, assignment: Assignment, request: Message) -> Message:
        """The response. Raises RowRefusedError, ClosedError."""
        future: Future[Message] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the worker is shutting down")
            self._last += 1
            number = self._last
            self._open[number] = future
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        attempt = {"batch_idx": assignment.batch_idx, "attempt_id": assignment.attempt_id}
        self._outgoing.append({"number": number, **attempt, **request})
        found = await asyncio.wrap_future(future)
        if "refused" in found:
            raise RowRefusedError(found["refused"])
        return found["answer"]

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._send({"asks": outgoing})

    def answered(self, answers: Sequence[Message]) -> None:
        """Called by the reading thread. A response to a cancelled request is dropped."""
        for answer in answers:
            with self._lock:
                waiting = self._open.pop(int(answer["number"]), None)
            if waiting is not None and waiting.set_running_or_notify_cancel():
                waiting.set_result(answer)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiting, self._open = list(self._open.values()), {}
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ClosedError("the worker is shutting down"))

    async def shape(self, assignment: Assignment, model: str) -> ModelShape:
        """The shape of a model's base, requested once. Raises RowRefusedError."""
        if model not in self._shapes:
            from tinsmith.types import ModelShape, VisionShape

            facts = await self.ask(assignment, {"verb": "model", "payload": {"model": model}})
            vision = facts["shape"]["vision"]
            given = facts["shape"] | {"vision": vision and VisionShape(**vision)}
            self._shapes[model] = ModelShape(**given)
        return self._shapes[model]

    async def text(self, assignment: Assignment, model: str) -> ModelTokenizer:
        """The tokenizer and chat template of a model's base, loaded once."""
        shape = await self.shape(assignment, model)
        return self._texts.get(shape.name) or await asyncio.to_thread(self._text_of, shape)

    def _text_of(self, shape: ModelShape) -> ModelTokenizer:
        from tinsmith.chat.tokenizer import ModelTokenizer

        with self._reading:
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

    async def sample(self, model: str, request: Mapping[str, Any], key: str = "") -> Sampled:
        answer = await self.ask("sample", {"model": model, "request": request}, key)
        sampled = sampled_of(base64.b64decode(answer["result"]))
        chunks = request["prompt"]["chunks"]
        prompt = sum(len(chunk["tokens"]) if "tokens" in chunk else chunk["expected_tokens"] for chunk in chunks)
        self.count(prompt, sum(len(each.tokens) for each in sampled.sequences))
        return sampled

    async def text(self, model: str) -> ModelTokenizer:
        return await self._channel.text(self._assignment, model)

    async def context(self, model: str) -> int:
        return (await self._channel.shape(self._assignment, model)).max_context_length


def sampled_of(body: bytes) -> Sampled:
    """The result of a sample, from the service's wire bytes."""
    from tinsmith.wire.sampling import read_sample_result

    result = read_sample_result(body, "")
    sequences = [
        Answer(each.tokens_T.tolist(), each.logprobs_T.tolist(), each.stop_reason, _topk(each.topk))
        for each in result.sequences
    ]
    scores = None
    if result.prompt_logprobs_T is not None:
        scores = [None if value != value else value for value in result.prompt_logprobs_T.tolist()]
    return Sampled(sequences, scores, _topk(result.topk_prompt))


def _topk(found: TopK | None) -> list[list[tuple[int, float]]] | None:
    from tinsmith.types import EMPTY_LOGPROB

    if found is None:
        return None
    rows = zip(found.token_ids_Tk.tolist(), found.logprobs_Tk.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] != EMPTY_LOGPROB] for row in rows]


async def answers(
    steps: Sequence[RowOperation],
    rows: Sequence[Row],
    indices: Sequence[int],
    assignment: Assignment,
    channel: Channel,
    first_step: int,
) -> tuple[list[Row | Exception], tuple[int, int]]:
    """The result or error of each row, and the tokens of all. The number of the first step is part of the names of
    requests: two operations of a job must not share it."""
    made = await asyncio.gather(
        *(_row(steps, row, index, assignment, channel, first_step) for row, index in zip(rows, indices, strict=True))
    )
    tokens = sum(tokens_in for _, (tokens_in, _) in made), sum(tokens_out for _, (_, tokens_out) in made)
    return [result for result, _ in made], tokens


async def _row(
    steps: Sequence[RowOperation], row: Row, index: int, assignment: Assignment, channel: Channel, first_step: int
) -> tuple[Row | Exception, tuple[int, int]]:
    """One row through all steps: its result or error, and its tokens, which also count for a failed row."""
    tokens_in = tokens_out = 0
    made: Row | Exception = row
    for number, step in enumerate(steps, first_step):
        service = ChannelRowService(channel, assignment, index, number)
        try:
            made = await step.answer(made, service)
        except ClosedError:
            raise  # not the row's fault
        except Exception as error:  # noqa: BLE001 (any error fails the row)
            made = error
        tokens_in += service.tokens_in
        tokens_out += service.tokens_out
        if isinstance(made, Exception):
            break
    return made, (tokens_in, tokens_out)
