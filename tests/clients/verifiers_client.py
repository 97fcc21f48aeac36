"""verifiers against a server: its evaluation client with three protocols, and its training client with tokens and
logprobs."""

import asyncio
import os

from checks import KEY, NANO, SAY, TOOLS, URL, check

os.environ |= {"SERVER_KEY": KEY, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}

from verifiers.v1.clients import EvalClientConfig, TrainClientConfig, resolve_client
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.types import SamplingConfig

PLACE = {"base_url": f"{URL}/v1", "api_key_var": "SERVER_KEY"}
GREEDY = SamplingConfig(temperature=0.0, max_tokens=12)


async def main() -> None:
    evaluates, trains = resolve_client(EvalClientConfig(**PLACE)), resolve_client(TrainClientConfig(**PLACE))
    chat = {"model": TOOLS, "messages": SAY, "temperature": 0, "max_tokens": 12}
    said = None
    with check("evaluation by chat"):
        said = await evaluates.get_response(ChatDialect(), chat, GREEDY)
        assert said.message.content and said.usage.completion_tokens > 0
    with check("evaluation by responses"):
        body = {"model": NANO, "input": "Say hello.", "temperature": 0, "max_output_tokens": 40}
        assert (await evaluates.get_response(ResponsesDialect(), body, GREEDY)).usage.completion_tokens > 0
    with check("evaluation by messages"):
        body = {"model": NANO, "messages": SAY, "max_tokens": 40}
        assert (await evaluates.get_response(AnthropicDialect(), body, GREEDY)).usage.completion_tokens > 0
    with check("training by tokens"):
        turn = await trains.get_response(ChatDialect(), chat, GREEDY)
        tokens = turn.tokens
        assert len(tokens.completion_ids) == len(tokens.completion_logprobs) == turn.usage.completion_tokens > 0
        assert all(logprob <= 0 for logprob in tokens.completion_logprobs) and len(tokens.prompt_ids) > 0
        assert said is not None and turn.usage.completion_tokens == said.usage.completion_tokens
    await evaluates.close()
    await trains.close()


asyncio.run(main())
