"""LlamaIndex against a server, through OpenAILike: for every family an agent that calls a tool, forced calls whole and
streamed with the result sent back, and objects of a schema; on nano chats, completions and their streams."""

import asyncio
from typing import Literal

from checks import FAMILIES, KEY, NANO, URL, check
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

QUESTION = "Is it raining?"
calls = []


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # random weights would add names without end
    city: Literal["Rome", "Oslo"]
    rain: bool


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather of a city."""
    calls.append(city)
    return f"It is dry in {city}."


def new_model(name, *, chat=True, tools=True, **settings):
    place = {"api_base": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    kind = {"is_chat_model": chat, "is_function_calling_model": tools, "context_window": 16384}
    return OpenAILike(model=name, max_tokens=2000, **place, **kind, **settings)


async def check_family(family) -> None:
    model, tool = new_model(family), FunctionTool.from_defaults(weather, fn_schema=City)
    with check(f"{family}: a call, its result and an answer"):
        called = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
        (selection, *_) = model.get_tool_calls_from_response(called)
        assert selection.tool_name == "weather" and selection.tool_kwargs["city"] in ("Rome", "Oslo")
        result = ChatMessage(
            role="tool", content=weather(**selection.tool_kwargs), additional_kwargs={"tool_call_id": selection.tool_id}
        )
        answer = model.chat([ChatMessage(role="user", content=QUESTION), called.message, result])
        assert answer.message.role == "assistant"
    with check(f"{family}: a call in a stream"):
        for piece in model.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True):
            last = piece
        assert model.get_tool_calls_from_response(last)[0].tool_name == "weather"
    with check(f"{family}: an agent"):
        calls.clear()
        agent = FunctionAgent(tools=[tool], llm=model, system_prompt="Be brief.", initial_tool_choice="weather")
        answer = await agent.run(user_msg=QUESTION, max_iterations=20)
        assert calls and answer.response is not None
    with check(f"{family}: an object by a tool"):
        program = FunctionCallingProgram.from_defaults(output_cls=Forecast, prompt_template_str="Rain?", llm=model)
        assert isinstance(program(), Forecast)
    with check(f"{family}: an object by a format"):
        structured = new_model(family, should_use_structured_outputs=True).as_structured_llm(Forecast)
        assert isinstance((await structured.achat([ChatMessage(role="user", content=QUESTION)])).raw, Forecast)


async def main() -> None:
    model = new_model(NANO, tools=False, temperature=0)
    with check("chat and its stream"):
        said = model.chat([ChatMessage(role="user", content="Say hello.")]).message.content
        pieces = list(model.stream_chat([ChatMessage(role="user", content="Say hello.")]))
        assert said and pieces[-1].message.content == said
    with check("completion and its stream"):
        plain = OpenAILike(model=NANO, api_base=f"{URL}/v1", api_key=KEY, max_tokens=8, temperature=0)
        assert list(plain.stream_complete("a"))[-1].text == plain.complete("a").text
    with check("awaited"):
        assert (await model.achat([ChatMessage(role="user", content="Say hello.")])).message.content == said
    for family in FAMILIES:
        await check_family(family)


asyncio.run(main())
