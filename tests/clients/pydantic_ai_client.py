"""pydantic-ai against a server: agents through OpenAI's chat, responses and Anthropic's messages; for every family
objects by a forced tool and by a format, streams, and a tool's result in the history."""

import asyncio
from typing import Literal

from checks import FAMILIES, KEY, NANO, URL, check
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Is it raining?"
RETRIES = {"tools": 20, "output": 20}
"""Random weights may write arguments without end, and empty answers."""
SETTINGS = {"max_tokens": 2000, "temperature": 1.0}
HISTORY = [
    ModelRequest(parts=[UserPromptPart(QUESTION)]),
    ModelResponse(parts=[TextPart("Let me see."), ToolCallPart("weather", {"city": "Rome"}, "a"),
                         ToolCallPart("weather", {"city": "Oslo"}, "b")]),
    ModelRequest(parts=[ToolReturnPart("weather", "dry", "a"), ToolReturnPart("weather", "wet", "b")]),
]  # fmt: skip
calls = []


class Forecast(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    rain: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather of a city."""
    calls.append(city)
    return f"It is dry in {city}."


async def limit_calls(_context, definition):
    """Offer the tool until it was called a few times, since random weights may call it without end."""
    return definition if len(calls) < 4 else None


TOOL = Tool(weather, prepare=limit_calls)


async def check_family(name, model, has_formats) -> None:
    agent = Agent(model, tools=[TOOL], instructions="Be brief.", retries=RETRIES)
    with check(f"{name}: an agent with a tool"):
        calls.clear()
        forced = Agent(model, tools=[TOOL], output_type=ToolOutput(Forecast), retries=RETRIES)
        assert isinstance((await forced.run(QUESTION, model_settings=SETTINGS)).output, Forecast)
    with check(f"{name}: a tool's results in the history"):
        answered = await agent.run("And now?", message_history=HISTORY, model_settings=SETTINGS)
        assert answered.usage.output_tokens > 0
    with check(f"{name}: an object by a tool in a stream"):
        typed = Agent(model, output_type=ToolOutput(Forecast), retries=RETRIES)
        async with typed.run_stream(QUESTION, model_settings=SETTINGS) as stream:
            assert isinstance(await stream.get_output(), Forecast)
    if has_formats:
        with check(f"{name}: an object by a format"):
            calls.clear()
            typed = Agent(model, output_type=NativeOutput(Forecast), tools=[TOOL], retries=RETRIES)
            assert isinstance((await typed.run(QUESTION, model_settings=SETTINGS)).output, Forecast)
    with check(f"{name}: text in a stream"):
        await stream_text(Agent(model))


async def stream_text(agent) -> None:
    """Compare the deltas with the text, of the first answer that is not empty."""
    for _ in range(RETRIES["output"]):
        try:
            async with agent.run_stream(QUESTION, model_settings=SETTINGS) as stream:
                deltas = [delta async for delta in stream.stream_text(delta=True)]
                assert "".join(deltas) == await stream.get_output()
            return
        except UnexpectedModelBehavior:
            continue
    raise AssertionError("every answer is empty")


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
for name, model in (
    ("OpenAI's chat", OpenAIChatModel(NANO, provider=openai)),
    ("OpenAI's responses", OpenAIResponsesModel(NANO, provider=openai)),
    ("Anthropic's messages", AnthropicModel(NANO, provider=AnthropicProvider(base_url=URL, api_key=KEY))),
):
    with check(name):
        answered = Agent(model).run_sync("Say hello.", model_settings={"max_tokens": 40, "temperature": 0.0})
        assert answered.output


async def main() -> None:
    messages = AnthropicProvider(base_url=URL, api_key=KEY)
    for family in FAMILIES:
        await check_family(f"{family} by chat", OpenAIChatModel(family, provider=openai), True)
        await check_family(f"{family} by responses", OpenAIResponsesModel(family, provider=openai), True)
        await check_family(f"{family} by messages", AnthropicModel(family, provider=messages), False)


asyncio.run(main())
