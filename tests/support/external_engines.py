"""vLLM and SGLang as far as their HTTP contracts are used here, over a model of a few formulas: no weights, no device.

    python tests/support/external_engines.py vllm --port 8123 --model DIRECTORY ...    # with vLLM's options

The model's next token depends on the last three and on the adapter's weight (the fake backend's file); everything that
is reported follows from that by the engines' own definitions. `make test-vllm` sends the same requests to a real vLLM
and compares what comes back, field by field.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

Logits = npt.NDArray[np.float64]
Json = dict[str, Any]
DEADLY = 13
"""A prompt that begins with this token ends the engine."""
NEVER_ENDING = 12
"""One that begins with this is answered only when its connection is closed."""


@dataclass
class Engine:
    """What a test sees and turns."""

    vocab_size: int = 64
    context: int = 128
    processed: bool = True
    requests: list[tuple[str, Json]] = field(default_factory=list)
    adapters: dict[str, float] = field(default_factory=dict)
    names_ever: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    busy: int = 0
    dead: bool = False
    deaths: int = 0
    closed: int = 0
    process: bool = False
    pause_s: float = 0.0
    adapter_pause_s: float = 0.0
    """How long an adapter is loaded, and unloaded."""
    deterministic: bool = True
    most_adapters: int = 1000
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """What every request must have; without, it is answered with 401."""
    endpoint: str = ""
    """The hub that adapters are downloaded from, HF_ENDPOINT of a real engine."""
    version: str = "0.5.18"
    lora_target_modules: tuple[str, ...] = ("all",)
    lora_backend: str = "csgmv"
    counts_newest_token: bool = True
    incremental: bool = False
    """Whether SGLang runs with --incremental-streaming-output."""
    cut_after: int = 0
    """The connection of the next stream is closed after this many events; 0 closes none."""
    asleep: list[str] = field(default_factory=list)
    """The parts of its memory that it has released."""
    broken: list[str] = field(default_factory=list)
    """The orders that a real engine would not have survived."""
    device_is_free: bool = True
    """Whether no trainer has the device."""
    refused: int = 0
    downloads: list[str] = field(default_factory=list)

    def logits(self, tokens: list[int], weight: float) -> Logits:
        mark = sum((position + 2) * token for position, token in enumerate(tokens[-3:])) + 1
        return 3 * np.sin((mark + 7.3 * weight) * np.arange(1, self.vocab_size + 1) * 0.7)

    def die(self) -> None:
        self.deaths += 1
        self.dead = True
        self.adapters.clear()
        self.asleep.clear()
        if self.process:
            os._exit(1)

    def release(self, *parts: str) -> None:
        for part in parts:
            if self.running or part in self.asleep:
                self.broken.append(f"{part} released with {self.running} requests and {self.asleep} asleep")
            self.asleep.append(part)

    def resume(self, *parts: str) -> None:
        for part in parts:
            if part not in self.asleep or (part != "weights" and "weights" in self.asleep) or not self.device_is_free:
                self.broken.append(f"{part} resumed with {self.asleep} asleep, device free: {self.device_is_free}")
            elif part == "kv_cache" and len(self.asleep) > 1:
                self.broken.append(f"the KV cache resumed before {self.asleep}")
            self.asleep = [other for other in self.asleep if other != part]

    def use(self, action: str, *parts: str) -> None:
        if not set(parts or self.asleep).isdisjoint(self.asleep):
            self.broken.append(f"{action} with {self.asleep} asleep")

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


@dataclass
class GenerationRequest:
    """A request in the fake's own words."""

    tokens: list[int]
    weight: float
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence: float
    frequency: float
    repetition: float
    bias: dict[int, float]
    seed: int | None
    stop_tokens: set[int]
    stops: list[str]


@dataclass
class Step:
    token: int
    raw: Logits
    tempered: Logits  # over the whole vocabulary, penalties included
    processed: Logits
    finish: str


def text_of(token: int) -> str:
    return chr(ord("a") + token % 26)


def generate(engine: Engine, request: GenerationRequest) -> Iterator[Step]:
    rng = np.random.default_rng(request.seed)
    answer: list[int] = []
    while True:
        raw = engine.logits(request.tokens + answer, request.weight)
        logits = raw.copy()
        for token, value in request.bias.items():
            logits[token] += value
        for token in {*request.tokens, *answer}:
            logits[token] = (
                logits[token] / request.repetition if logits[token] > 0 else logits[token] * request.repetition
            )
        for token in set(answer):
            logits[token] -= request.presence + request.frequency * answer.count(token)
        temperature = request.temperature or 1.0
        tempered = logits / temperature
        processed = tempered.copy()
        if request.temperature:
            probabilities = np.exp(log_softmax(processed))
            processed[probabilities < request.min_p * probabilities.max()] = -np.inf
            if request.top_k > 0:
                processed[processed < np.sort(processed)[-request.top_k]] = -np.inf
            order = np.argsort(-processed)
            before = np.cumsum(np.exp(log_softmax(processed))[order]) - np.exp(log_softmax(processed))[order]
            processed[order[before >= request.top_p]] = -np.inf
            token = int(rng.choice(engine.vocab_size, p=np.exp(log_softmax(processed))))
        else:
            token = int(processed.argmax())
        answer.append(token)
        text = "".join(map(text_of, answer))
        finish = "stop" if token in request.stop_tokens or any(stop in text for stop in request.stops) else ""
        if not finish and len(answer) >= request.max_tokens:
            finish = "length"
        yield Step(token, log_softmax(raw), log_softmax(tempered), log_softmax(processed), finish)
        if finish:
            return


def prompt_logprobs(engine: Engine, tokens: list[int], weight: float) -> list[Logits]:
    return [log_softmax(engine.logits(tokens[:length], weight)) for length in range(1, len(tokens))]


def clamp(value: float | Logits) -> float:
    return float(max(value, -9999.0))


def error(status: int, message: str, kind: str = "BadRequestError") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


@contextlib.contextmanager
def count_running(engine: Engine) -> Iterator[None]:
    engine.running += 1
    engine.most_running = max(engine.most_running, engine.running)
    try:
        yield
    finally:
        engine.running -= 1


async def inject_fault(engine: Engine, request: Request, tokens: list[int]) -> Response | None:
    """What a request may run into before it is answered."""
    engine.use("a request")
    if engine.dead:
        return error(500, "EngineCore encountered an issue", "InternalServerError")
    if engine.busy:
        engine.busy -= 1
        return error(503, "busy", "ServiceUnavailableError")
    if tokens and tokens[0] == DEADLY:
        engine.die()
        return error(500, "EngineCore encountered an issue", "InternalServerError")
    started_at, endless = time.monotonic(), bool(tokens) and tokens[0] == NEVER_ENDING
    while endless or time.monotonic() < started_at + engine.pause_s:  # read each time: a test may end the pause
        await asyncio.sleep(0.01)
        if engine.dead:
            return error(500, "EngineCore encountered an issue", "InternalServerError")
        if await request.is_disconnected():
            engine.closed += 1
            return error(499, "closed")
    return None


async def body_of(engine: Engine, request: Request) -> Json:
    text = await request.body()
    body = json.loads(text) if text else {}
    engine.requests.append((request.url.path + (f"?{request.url.query}" if request.url.query else ""), body))
    return body


def weight_in(directory: str, engine: Engine) -> float:
    if engine.endpoint and not Path(directory).is_absolute():
        engine.downloads.append(directory)
        with tempfile.TemporaryDirectory() as home:
            script = "import sys, huggingface_hub as hub; print(hub.snapshot_download(sys.argv[1]))"
            environment = os.environ | {"HF_ENDPOINT": engine.endpoint, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
            words = [sys.executable, "-c", script, directory]
            completed = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            if completed.returncode:
                raise OSError(completed.stderr)
            return float(json.loads((Path(completed.stdout.strip()) / "fake_adapter.json").read_text())["weight"])
    path = Path(directory) / "fake_adapter.json"
    return float(json.loads(path.read_text())["weight"])


# vLLM.


def vllm_app(engine: Engine) -> Starlette:
    async def completions(request: Request) -> Response:
        body = await body_of(engine, request)
        with count_running(engine):
            if refused := await inject_fault(engine, request, body["prompt"]):
                return refused
            model = body["model"]
            if model != "tinsmith-base" and model not in engine.adapters:
                return error(404, f"The model `{model}` does not exist.", "NotFoundError")
            if len(body["prompt"]) + body["max_tokens"] > engine.context:
                return error(400, f"This model's maximum context length is {engine.context} tokens.")
            if body.get("stream"):
                return StreamingResponse(vllm_stream(engine, body), media_type="text/event-stream")
            return JSONResponse(vllm_answer(engine, body))

    async def health(_: Request) -> Response:
        return Response(status_code=503 if engine.dead else 200)

    async def models(_: Request) -> Response:
        entries = [{"id": "tinsmith-base", "parent": None, "max_model_len": engine.context}]
        entries += [{"id": name, "parent": "tinsmith-base", "max_model_len": None} for name in engine.adapters]
        return JSONResponse({"object": "list", "data": entries})

    async def load(request: Request) -> Response:
        body = await body_of(engine, request)
        if engine.dead:
            return error(500, "EngineCore encountered an issue", "InternalServerError")
        engine.use("an adapter loaded", "weights")
        name = body["lora_name"]
        if name in engine.names_ever:
            return error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        try:
            engine.adapters[name] = await asyncio.to_thread(weight_in, body["lora_path"], engine)
        except OSError:
            return error(404, f"Loading lora {name} failed: No adapter found for {body['lora_path']}", "NotFoundError")
        engine.names_ever.append(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        body = await body_of(engine, request)
        if engine.adapters.pop(body["lora_name"], None) is None:
            return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")

    async def sleep(request: Request) -> Response:
        await body_of(engine, request)
        engine.release("weights", "kv_cache")
        return Response()

    async def wake_up(request: Request) -> Response:
        await body_of(engine, request)
        engine.resume(*request.query_params.getlist("tags"))
        return Response()

    posts = {"/v1/completions": completions, "/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    posts |= {"/sleep": sleep, "/wake_up": wake_up}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    return Starlette(routes=[*routes, Route("/health", health), Route("/v1/models", models)])


def parse_vllm_request(engine: Engine, body: Json) -> GenerationRequest:
    stops = set(body["stop_token_ids"])
    return GenerationRequest(
        body["prompt"], engine.adapters.get(body["model"], 0.0), body["max_tokens"], body["temperature"], body["top_k"],
        body["top_p"], body["min_p"], body["presence_penalty"], body["frequency_penalty"], body["repetition_penalty"],
        {int(token): bias for token, bias in body.get("logit_bias", {}).items()}, body.get("seed"), stops, body["stop"],
    )  # fmt: skip


def vllm_choice(engine: Engine, body: Json, steps: list[Step]) -> Json:
    tops, values = [], []
    for step in steps:
        logprobs = step.processed if engine.processed else step.raw
        ids = body.get("logprob_token_ids") or np.argsort(-logprobs)[: body["logprobs"]].tolist()
        tops.append({f"token_id:{token}": clamp(logprobs[token]) for token in dict.fromkeys([step.token, *ids])})
        values.append(clamp(logprobs[step.token]))
    token_names = [f"token_id:{step.token}" for step in steps]
    completion_logprobs = {
        "text_offset": [0] * len(steps),
        "token_logprobs": values,
        "tokens": token_names,
        "top_logprobs": tops,
    }
    return {
        "index": 0,
        "text": "".join(text_of(step.token) for step in steps),
        "logprobs": completion_logprobs,
        "finish_reason": steps[-1].finish or None,
        "stop_reason": None,
        "token_ids": [step.token for step in steps],
        "prompt_token_ids": body["prompt"],
    }


def vllm_answer(engine: Engine, body: Json) -> Json:
    request = parse_vllm_request(engine, body)
    choice = vllm_choice(engine, body, list(generate(engine, request)))
    choice["prompt_logprobs"] = None
    if (k := body.get("prompt_logprobs")) is not None:
        rows: list[Json | None] = [None]
        for position, logprobs in enumerate(prompt_logprobs(engine, request.tokens, request.weight), 1):
            best = np.argsort(-logprobs)[: engine.vocab_size if k < 0 else k].tolist()
            ids = dict.fromkeys([request.tokens[position], *best])
            rows.append(
                {str(token): {"logprob": clamp(logprobs[token]), "rank": 1, "decoded_token": ""} for token in ids}
            )
        choice["prompt_logprobs"] = rows
    choice["routed_experts"] = None
    usage = {
        "prompt_tokens": len(request.tokens),
        "prompt_tokens_details": {"cached_tokens": len(request.tokens) // 16 * 16},
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice],
            "usage": usage}  # fmt: skip


async def vllm_stream(engine: Engine, body: Json) -> AsyncIterator[str]:
    for index, step in enumerate(generate(engine, parse_vllm_request(engine, body))):
        if engine.cut_after and index == engine.cut_after:
            engine.cut_after = 0
            return
        yield f"data: {json.dumps({'choices': [vllm_choice(engine, body, [step])]})}\n\n"
        await asyncio.sleep(0)
    yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens_details': {'cached_tokens': 0}}})}\n\n"
    yield "data: [DONE]\n\n"


# SGLang.


def sglang_app(engine: Engine) -> Starlette:
    async def answers(request: Request) -> Response:
        body = await body_of(engine, request)
        with count_running(engine):
            if refused := await inject_fault(engine, request, body["input_ids"]):
                return refused
            name = body["lora_path"]
            if name is not None and name not in engine.adapters:
                return error(400, f"LoRA adapter {name} is not loaded")
            if len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] > engine.context:
                return error(400, f"The input exceeds the context length ({engine.context} tokens).")
            if body.get("stream"):
                return StreamingResponse(sglang_stream(engine, body), media_type="text/event-stream")
            return JSONResponse(sglang_answer(engine, body))

    async def health(_: Request) -> Response:
        engine.use("a health check, which generates a token,")
        return Response(status_code=503 if engine.dead else 200)

    async def model_info(_: Request) -> Response:
        return JSONResponse({"model_path": "model", "is_generation": True}, 503 if engine.dead else 200)

    async def server_info(_: Request) -> Response:
        info = {"enable_lora": True, "enable_deterministic_inference": engine.deterministic, "version": engine.version}
        info |= {"lora_target_modules": list(engine.lora_target_modules), "lora_backend": engine.lora_backend}
        info["disable_overlap_schedule"] = engine.counts_newest_token
        return JSONResponse({**info, "context_length": engine.context})

    async def load(request: Request) -> Response:
        body = await body_of(engine, request)
        engine.use("an adapter loaded", "weights")
        if len(engine.adapters) >= engine.most_adapters or body["lora_name"] in engine.names_ever:
            return JSONResponse({"success": False, "error_message": "no room", "loaded_adapters": {}}, 400)
        await asyncio.sleep(engine.adapter_pause_s)
        engine.adapters[body["lora_name"]] = await asyncio.to_thread(weight_in, body["lora_path"], engine)
        engine.names_ever.append(body["lora_name"])
        return JSONResponse({"success": True, "error_message": "", "loaded_adapters": {}})

    async def unload(request: Request) -> Response:
        body = await body_of(engine, request)
        await asyncio.sleep(engine.adapter_pause_s)
        was_loaded = engine.adapters.pop(body["lora_name"], None) is not None
        return JSONResponse(
            {"success": was_loaded, "error_message": "", "loaded_adapters": {}}, 200 if was_loaded else 400
        )

    async def acknowledge(request: Request) -> Response:
        await body_of(engine, request)
        return PlainTextResponse("")

    async def flush(request: Request) -> Response:
        await body_of(engine, request)
        if engine.running:
            return PlainTextResponse("Flush cache failed because of pending requests", 400)
        return PlainTextResponse("Cache flushed.\n")

    async def release(request: Request) -> Response:
        engine.release(*(await body_of(engine, request))["tags"])
        return JSONResponse(None)

    async def resume(request: Request) -> Response:
        engine.resume(*(await body_of(engine, request))["tags"])
        return JSONResponse(None)

    posts = {"/generate": answers, "/load_lora_adapter": load, "/unload_lora_adapter": unload}
    posts |= {"/abort_request": acknowledge, "/flush_cache": flush}
    posts |= {"/release_memory_occupation": release, "/resume_memory_occupation": resume}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    # Before version 0.5.10, the engine's facts were at other paths.
    older = "get_" if engine.version < "0.5.10" else ""
    gets = {"/health": health, f"/{older}model_info": model_info, f"/{older}server_info": server_info}
    return Starlette(routes=[*routes, *(Route(path, handler) for path, handler in gets.items())])


async def sglang_stream(engine: Engine, body: Json) -> AsyncIterator[str]:
    """Each event has the whole answer so far, or, if incremental, what is new. Two tokens may share an event."""
    final = sglang_answer(engine, body)
    lists = {name: values for name, values in final["meta_info"].items() if name.startswith("output_")}
    finish, total = final["meta_info"]["finish_reason"], len(final["output_ids"])
    ends = [*range(1, total, 2), total]
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if engine.cut_after and index == engine.cut_after:
            engine.cut_after = 0
            return
        first = start if engine.incremental else 0
        meta = final["meta_info"] | {name: values[first:end] for name, values in lists.items()}
        meta |= {"completion_tokens": end, "finish_reason": finish if end == total else None}
        event = {"text": None, "output_ids": final["output_ids"][first:end], "meta_info": meta}
        yield f"data: {json.dumps(event)}\n\n"
        await asyncio.sleep(0)
    yield "data: [DONE]\n\n"


def sglang_answer(engine: Engine, body: Json) -> Json:
    params = body["sampling_params"]
    stops = set() if params["ignore_eos"] else set(params.get("stop_token_ids", []))
    seed = params.get("sampling_seed", 42) if engine.deterministic else None
    name = body["lora_path"]
    parsed = GenerationRequest(
        body["input_ids"], engine.adapters[name] if name else 0.0, params["max_new_tokens"], params["temperature"],
        params["top_k"], params["top_p"], params["min_p"], params["presence_penalty"], params["frequency_penalty"], 1.0,
        {int(token): bias for token, bias in params.get("logit_bias", {}).items()}, seed, stops, params.get("stop", []),
    )  # fmt: skip
    steps = list(generate(engine, parsed))
    k = body["top_logprobs_num"]
    step_logprobs = [step.tempered for step in steps]
    meta: Json = {
        "id": body["rid"],
        "finish_reason": {"type": steps[-1].finish},
        "prompt_tokens": len(parsed.tokens),
        "completion_tokens": len(steps),
        "cached_tokens": 0,
        "output_token_logprobs": [
            [clamp(row[step.token]), step.token, None] for row, step in zip(step_logprobs, steps, strict=True)
        ],
        "output_top_logprobs": [
            [[clamp(row[token_id]), token_id, None] for token_id in np.argsort(-row)[:k].tolist()] if k else None
            for row in step_logprobs
        ],
    }
    if ids := body.get("token_ids_logprob"):
        meta["output_token_ids_logprobs"] = [
            [[clamp(row[token_id]), token_id, None] for token_id in ids] for row in step_logprobs
        ]
    if (start := body["logprob_start_len"]) >= 0:
        rows = [None, *prompt_logprobs(engine, parsed.tokens, parsed.weight)][start:]
        rows[0] = None  # the first that is told of has none
        prompt_rows, top_rows, chosen_rows = [], [], []
        for position, row in enumerate(rows, start):
            token = parsed.tokens[position]
            prompt_rows.append([None if row is None else clamp(row[token]), token, None])
            top_rows.append(None if row is None else [[clamp(row[o]), o, None] for o in np.argsort(-row)[:k].tolist()])
            ids = body.get("token_ids_logprob", [])
            chosen_rows.append(None if row is None else [[clamp(row[token_id]), token_id, None] for token_id in ids])
        meta |= {
            "input_token_logprobs": prompt_rows,
            "input_top_logprobs": top_rows,
            "input_token_ids_logprobs": chosen_rows,
        }
    return {"text": "", "output_ids": [step.token for step in steps], "meta_info": meta}


APPS = {"vllm": vllm_app, "sglang": sglang_app}


def require_headers(engine: Engine, app: Starlette) -> ASGIApp:
    """As behind a gateway: requests without the engine's headers are answered with 401."""

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if any(headers.get(name) != value for name, value in engine.headers.items()):
            engine.refused += 1
            await error(401, "Unauthorized", "AuthenticationError")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return check


@contextlib.contextmanager
def running(kind: str, engine: Engine, certificate: Path | None = None) -> Iterator[Engine]:
    """The engine on a free port of this process, until the end of the block; with TLS if there is a certificate, whose
    file has its key, too.
    """
    app = require_headers(engine, APPS[kind](engine))
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ssl_certfile=certificate)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    engine.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=APPS)
    parser.add_argument("--port", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    uvicorn.run(APPS[arguments.kind](Engine(process=True)), port=arguments.port, log_level="error", lifespan="off")


if __name__ == "__main__":
    sys.exit(main())
