"""`tinsmith demo`: trains the embedded model with the official SDK, in about two minutes on a laptop.

Supervised fine-tuning teaches it consistent pig latin; reinforcement learning improves its sums. All training is done
through the `tinker` SDK over HTTP, as in a user's script; only the tasks come from `tinsmith.base_models.nano`. At the
end the model calls a tool through OpenAI's protocol.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tinker
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith.base_models import nano
from tinsmith.base_models.nano import PromptExample, Split, draw
from tinsmith.errors import SettingsError
from tinsmith.exchange.metrics import RunMetrics
from tinsmith.settings.environment import demo_environment

SFT_TASK, SFT_STEPS, SFT_BATCH, SFT_RATE = "pig_latin", 24, 32, 2e-3
RL_TASK, RL_STEPS, RL_PROMPTS, RL_GROUP, RL_RATE = "add", 24, 16, 8, 1e-3
RANK = 16
NUM_HELD_OUT = 64
MAX_TOKENS = 48
START_S = 120.0
API_KEY = "tml-demo"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two digits.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("a", "b")},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Chat:
    """Converts examples to tokens and completions to text."""

    tokenizer: PreTrainedTokenizerBase

    def prompt(self, example: PromptExample) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": example.prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        assert isinstance(text, str)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def answer(self, example: PromptExample) -> list[int]:
        return self.tokenizer.encode(f"{example.answer}<|im_end|>", add_special_tokens=False)

    def read(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The shares of correct answers to held-out prompts before and after training, and the checkpoint."""

    task: str
    before: float
    after: float
    path: str


def run_demo(
    output: Console, data_dir: Path | None, *, stay: bool, on_done: Callable[[object], None] | None = None
) -> None:
    """Serve, train with SFT and RL, show the results and pass them to `on_done`. With `stay`, serve on until Ctrl-C."""
    # By default, SIGTERM would end this process without stopping the server that it started.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(143))
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-demo-")))
        url = stack.enter_context(_running_server(data_dir))
        output.rule("[bold]Tinsmith demo")
        output.print(f"The server runs at {url} and serves {nano.MODEL_NAME}.", soft_wrap=True)
        chat = Chat(AutoTokenizer.from_pretrained(str(nano.path())))
        service = stack.enter_context(tinker.ServiceClient(base_url=url, api_key=API_KEY))
        sft = _show_sft(output, service, chat)
        rl = _show_rl(output, service, chat, url)
        call = show_call(output, url)
        output.rule("[bold]Done")
        output.print(f"Checkpoints: {sft.path}\n             {rl.path}", soft_wrap=True)
        if on_done:
            on_done({"url": url, "sft": asdict(sft), "rl": asdict(rl), "call": call})
        output.print(f"The server is at [bold]{url}[/]", highlight=False)
        output.print(f"  export TINKER_BASE_URL={url} TINKER_API_KEY={API_KEY}", highlight=False, soft_wrap=True)
        if stay:
            output.print("Press Ctrl-C to stop.")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


def _show_sft(output: Console, service: tinker.ServiceClient, chat: Chat) -> TrainingOutcome:
    output.rule(f"Supervised fine-tuning: {SFT_TASK}, {SFT_STEPS} steps of {SFT_BATCH} examples")
    client = service.create_lora_training_client(nano.MODEL_NAME, rank=RANK, seed=1).result()
    held_out = _examples(SFT_TASK, "heldout", NUM_HELD_OUT, seed=1)
    before = _answers(client, chat, held_out)
    rng = random.Random(2)
    started = time.monotonic()
    for step in range(SFT_STEPS):
        data = [_make_supervised_datum(chat, draw(SFT_TASK, rng, "train")) for _ in range(SFT_BATCH)]
        # Both requests are submitted before the first is awaited; the server runs them in order.
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=SFT_RATE * (1 - step / SFT_STEPS)))
        num_tokens = sum(int(np.sum(datum.loss_fn_inputs["weights"].data)) for datum in data)
        loss = passed.result().metrics["loss:sum"] / num_tokens
        stepped.result()
        _show_step(output, step, SFT_STEPS, "loss per token", loss, 1.0)
    output.print(f"{time.monotonic() - started:.0f} s")
    after = _answers(client, chat, held_out)
    shares = _show_answers(output, held_out, before, after)
    return TrainingOutcome(SFT_TASK, *shares, client.save_state("demo-sft").result().path)


def _show_rl(output: Console, service: tinker.ServiceClient, chat: Chat, url: str) -> TrainingOutcome:
    output.rule(f"Reinforcement learning: {RL_TASK}, {RL_STEPS} steps of {RL_PROMPTS} prompts x {RL_GROUP} samples")
    client = service.create_lora_training_client(nano.MODEL_NAME, rank=RANK, seed=2).result()
    run = RunMetrics(client.model_id, url, API_KEY)
    held_out = _examples(RL_TASK, "heldout", NUM_HELD_OUT, seed=3)
    before = _answers(client, chat, held_out)
    rng = random.Random(4)
    started = time.monotonic()
    for step in range(RL_STEPS):
        examples = [draw(RL_TASK, rng, "train") for _ in range(RL_PROMPTS)]
        data, rewards = _rollouts(client.save_weights_and_get_sampling_client().result(), chat, examples, run)
        if data:
            passed = client.forward_backward(data, "importance_sampling")
            stepped = client.optim_step(types.AdamParams(learning_rate=RL_RATE))
            passed.result()
            stepped.result()
        run.log({"reward": rewards}, step + 1)
        _show_step(output, step, RL_STEPS, "mean reward", sum(rewards) / len(rewards), 1.0)
    run.close()
    output.print(f"{time.monotonic() - started:.0f} s")
    after = _answers(client, chat, held_out)
    shares = _show_answers(output, held_out, before, after)
    return TrainingOutcome(RL_TASK, *shares, client.save_state("demo-rl").result().path)


def show_call(output: Console, url: str) -> dict[str, object]:
    """Ask the base model for a call of a tool, print the call, and return its name and arguments."""
    question = "What is 3 + 4?"
    body = {
        "model": nano.MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        message = json.load(response)["choices"][0]["message"]
    function = message["tool_calls"][0]["function"]
    call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    output.rule("A call of a tool, held to its schema by a grammar")
    output.print(f"{question}  ->  {call['name']}({function['arguments']})", highlight=False, markup=False)
    output.print("The model never learned tools: the grammar makes its call valid, not right.")
    return call


def _rollouts(
    sampler: tinker.SamplingClient, chat: Chat, examples: Sequence[PromptExample], run: RunMetrics
) -> tuple[list[types.Datum], list[float]]:
    """Sample a group per prompt. The advantage is the reward minus the group's mean."""
    prompts = [chat.prompt(example) for example in examples]
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), num_samples=RL_GROUP, sampling_params=params)
        for prompt in prompts
    ]
    data: list[types.Datum] = []
    rewards: list[float] = []
    for example, prompt, future in zip(examples, prompts, futures, strict=True):
        sequences = future.result().sequences
        group = [float(example.is_right(chat.read(sequence.tokens))) for sequence in sequences]
        rewards += group
        run.reward(prompt, [sequence.tokens for sequence in sequences], group)
        mean = sum(group) / len(group)
        if 0.0 < mean < 1.0:
            data += [
                _make_rl_datum(prompt, sequence, reward - mean)
                for sequence, reward in zip(sequences, group, strict=True)
            ]
    return data, rewards


def _make_supervised_datum(chat: Chat, example: PromptExample) -> types.Datum:
    prompt, answer = chat.prompt(example), chat.answer(example)
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=_tensors(target_tokens=np.array(tokens[1:]), weights=np.array(weights, np.float32)),
    )


def _make_rl_datum(prompt: Sequence[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    assert sequence.logprobs is not None
    tokens = [*prompt, *sequence.tokens]
    before = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs=_tensors(
            target_tokens=np.array(tokens[1:]),
            logprobs=np.array([*before, *sequence.logprobs], np.float32),
            advantages=np.array([*before, *[advantage] * len(sequence.tokens)], np.float32),
        ),
    )


def _tensors(**arrays: np.ndarray) -> dict[str, types.TensorData]:
    return {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}


def _answers(client: tinker.TrainingClient, chat: Chat, examples: Sequence[PromptExample]) -> list[str]:
    """Sample greedy answers from the current weights."""
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    futures = [
        sampler.sample(types.ModelInput.from_ints(chat.prompt(example)), num_samples=1, sampling_params=params)
        for example in examples
    ]
    return [chat.read(future.result().sequences[0].tokens) for future in futures]


def _examples(task: str, split: Split, count: int, seed: int) -> list[PromptExample]:
    rng = random.Random(seed)
    return [draw(task, rng, split) for _ in range(count)]


def _show_step(output: Console, step: int, steps: int, metric: str, value: float, full: float) -> None:
    bar = "#" * round(40 * min(value / full, 1.0))
    output.print(f"step {step + 1:2d}/{steps}  {metric} {value:6.3f}  {bar}", highlight=False)


def _show_answers(
    output: Console, examples: Sequence[PromptExample], before: Sequence[str], after: Sequence[str]
) -> tuple[float, float]:
    """Print the answers. Returns the shares of correct answers before and after."""
    table = Table("held-out prompt", "correct answer", "before", "after", title="Held-out prompts, greedy")
    for example, old, new in list(zip(examples, before, after, strict=True))[:8]:
        cells = [Text(text, "green" if example.is_right(text) else "red") for text in (old, new)]
        table.add_row(Text(example.prompt), Text(example.answer), *cells)
    output.print(table)
    old_share, new_share = (
        sum(map(PromptExample.is_right, examples, texts)) / len(examples) for texts in (before, after)
    )
    output.print(
        f"Correct on {len(examples)} held-out prompts: {old_share:.0%} before, [bold]{new_share:.0%}[/] after."
    )
    return old_share, new_share


@contextlib.contextmanager
def _running_server(data_dir: Path) -> Iterator[str]:
    """Run `tinsmith serve` as a separate process, and stop it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tinsmith.cli", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    log_path = data_dir / "server.log"
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=demo_environment(), start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_answer(process, url, log_path)
        yield url
    finally:
        process.terminate()
        process.wait()


def _await_answer(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise SettingsError(f"the server did not start:\n{log_path.read_text()[-2000:]}")
