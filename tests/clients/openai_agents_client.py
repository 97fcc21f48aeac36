"""OpenAI's agents SDK against a server: for every family and both protocols a loop with a tool, whole and streamed, and
an answer of a schema."""

import asyncio
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from checks import FAMILIES, KEY, URL, check
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
QUESTION = "Is it raining?"
MAX_TURNS = 20
MAX_CALLS = 4
"""Random weights may call the tool again, until there is no tool any more."""
calls = []


class Forecast(BaseModel):
    city: Literal["Rome", "Oslo"]
    rain: bool


@function_tool(is_enabled=lambda _context, _agent: len(calls) < MAX_CALLS)
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather of a city."""
    calls.append(city)
    return f"It is dry in {city}."


async def check_model(name, model) -> None:
    settings = ModelSettings(max_tokens=2000, tool_choice="required")
    agent = Agent(name="forecaster", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
    with check(f"{name}: a tool's result is answered"):
        calls.clear()
        result = await Runner.run(agent, QUESTION, max_turns=MAX_TURNS)
        assert calls and set(calls) <= {"Rome", "Oslo"} and isinstance(result.final_output, str)
        kinds = [item.type for item in result.new_items]
        assert "tool_call_item" in kinds and "tool_call_output_item" in kinds, kinds
        assert result.context_wrapper.usage.requests >= 2 and result.context_wrapper.usage.output_tokens > 0
    with check(f"{name}: the next turn knows the calls"):
        calls.clear()
        turns = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
        assert isinstance((await Runner.run(agent, turns, max_turns=MAX_TURNS)).final_output, str)
    with check(f"{name}: the loop in a stream"):
        calls.clear()
        streamed, deltas, items = Runner.run_streamed(agent, QUESTION, max_turns=MAX_TURNS), [], []
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                deltas.append(event.data.delta)
            elif event.type == "run_item_stream_event":
                items.append(event.name)
        assert calls and {"tool_called", "tool_output"} <= set(items), items
        assert "".join(deltas).endswith(streamed.final_output)
    with check(f"{name}: an answer of a schema"):
        settings = ModelSettings(max_tokens=2000)
        typed = Agent(name="typed", model=model, output_type=Forecast, model_settings=settings)
        assert isinstance((await Runner.run(typed, QUESTION)).final_output, Forecast)
    with check(f"{name}: a tool, then an answer of a schema, in a stream"):
        calls.clear()
        settings = ModelSettings(max_tokens=2000, tool_choice="weather")
        typed = Agent(name="both", model=model, tools=[weather], output_type=Forecast, model_settings=settings)
        streamed = Runner.run_streamed(typed, QUESTION, max_turns=MAX_TURNS)
        async for _ in streamed.stream_events():
            pass
        assert calls and isinstance(streamed.final_output, Forecast)


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    for family in FAMILIES:
        for protocol, model_class in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
            await check_model(f"{family} by {protocol}", model_class(family, client))


asyncio.run(main())
