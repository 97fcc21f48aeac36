"""dspy against a server: for every family a signature as JSON, its parts in a stream, and a native call of a tool with
its result in the history."""

import asyncio
from typing import Literal

import dspy
from checks import FAMILIES, KEY, NANO, URL, check
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

access = AccessPolicy(provider="tinsmith", env_keys=("SERVER_KEY",), base_url=f"{URL}/v1")
register_provider(
    ProviderDefinition.chat(access, compat=OpenAIChatCompat()),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


class Forecast(dspy.Signature):
    """Forecast the weather."""

    question: str = dspy.InputField()
    city: Literal["Rome", "Oslo"] = dspy.OutputField()
    rain: bool = dspy.OutputField()


class Lookup(dspy.Signature):
    """Look up the weather."""

    history: dspy.History = dspy.InputField()
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Answer(dspy.Signature):
    """Answer briefly."""

    question: str = dspy.InputField()
    answer: Literal["yes", "no"] = dspy.OutputField()


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Look up the weather of a city."""
    return f"It is dry in {city}."


def new_model(name, **settings):
    limits = {"max_tokens": 2000, "temperature": 1.0, "cache": False, "num_retries": 0}
    return dspy.LM(name, **limits, **settings)


async def stream() -> list:
    program = dspy.streamify(dspy.Predict(Answer), is_async_program=False)
    return [piece async for piece in program(question="Is it raining?")]


def look_up(history) -> dspy.ToolCalls:
    """Ask for a call, again if random weights write arguments without end: the schema allows more of them."""
    predict = dspy.Predict(Lookup, tool_choice="required")
    for _ in range(8):
        answer = predict(history=dspy.History(messages=history), tools=[dspy.Tool(weather)], **QUESTION)
        if answer.calls is not None:
            return answer.calls
    raise AssertionError(answer)


QUESTION = {"question": "Is it raining?"}
with check("a chat"):
    assert new_model(f"tinsmith/{NANO}")("Say hello.")[0]
with check("the responses API"):
    place = {"api_base": f"{URL}/v1", "api_key": KEY}
    assert new_model(f"openai/{NANO}", model_type="responses", **place)("Say hello.")[0]
for family in FAMILIES:
    dspy.configure(lm=new_model(f"tinsmith/{family}"), adapter=dspy.JSONAdapter())
    with check(f"{family}: a signature as JSON"):
        forecast = dspy.Predict(Forecast)(**QUESTION)
        assert forecast.city in ("Rome", "Oslo") and forecast.rain in (True, False)
    with check(f"{family}: a signature in a stream"):
        pieces = asyncio.run(stream())
        assert isinstance(pieces[-1], dspy.Prediction) and pieces[-1].answer in ("yes", "no"), pieces
    with check(f"{family}: a call of a tool"):
        calls = look_up([])
        assert calls.tool_calls[0].name == "weather" and calls.tool_calls[0].args["city"] in ("Rome", "Oslo"), calls
    with check(f"{family}: a call and its result in the history"):
        result = weather(calls.tool_calls[0].args["city"])
        turns = [{**QUESTION, "calls": calls}, {"question": result, "calls": dspy.ToolCalls(tool_calls=[])}]
        assert look_up(turns).tool_calls[0].name == "weather"
