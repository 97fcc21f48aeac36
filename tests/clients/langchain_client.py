"""langchain-openai against a server: invoke, stream, tools, logprobs, and the responses API; for every family and both
protocols a tool's call, its result and an answer, whole and streamed, and objects of a schema."""

from typing import Literal

from checks import FAMILIES, KEY, NANO, TOOL, TOOLS, URL, check
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

GIVEN = {"base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
TURNS = [SystemMessage("Be brief."), HumanMessage("Is it raining?")]


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # random weights would add names without end
    city: Literal["Rome", "Oslo"]
    rain: bool


chat = ChatOpenAI(model=NANO, max_tokens=12, **GIVEN)
said = chat.invoke("Say hello.")
with check("invoke"):
    assert said.content and said.usage_metadata["output_tokens"] > 0
with check("stream"):
    assert "".join(chunk.content for chunk in chat.stream("Say hello.")) == said.content
with check("logprobs"):
    scored = chat.bind(logprobs=True).invoke("Say hello.")
    assert scored.response_metadata["logprobs"]["content"]
with check("tools"):
    tools = ChatOpenAI(model=TOOLS, max_tokens=120, **GIVEN).bind_tools([TOOL], tool_choice="weather")
    assert tools.invoke("Is it raining?").tool_calls[0]["name"] == "weather"
with check("responses"):
    newer = ChatOpenAI(model=NANO, max_tokens=12, use_responses_api=True, **GIVEN)
    assert newer.invoke("Say hello.").text


def check_family(name, model) -> None:
    caller = model.bind_tools([TOOL], tool_choice="weather", parallel_tool_calls=False)
    with check(f"{name}: a call, its result and an answer"):
        called = caller.invoke(TURNS)
        assert called.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
        results = [ToolMessage("It is dry.", tool_call_id=call["id"]) for call in called.tool_calls]
        answer = model.bind_tools([TOOL]).invoke([*TURNS, called, *results])
        assert answer.usage_metadata["output_tokens"] > 0 and answer.response_metadata
    with check(f"{name}: a call in a stream"):
        joined = None
        for chunk in caller.stream(TURNS):
            joined = chunk if joined is None else joined + chunk
        assert joined.tool_calls[0]["name"] == "weather" and joined.tool_calls[0]["args"]["city"] in ("Rome", "Oslo")
        results = [ToolMessage("It is dry.", tool_call_id=call["id"]) for call in joined.tool_calls]
        assert model.bind_tools([TOOL]).invoke([*TURNS, joined, *results]).usage_metadata["output_tokens"] > 0
    for method in ("function_calling", "json_schema"):
        with check(f"{name}: an object by {method}"):
            typed = model.with_structured_output(Forecast, method=method)
            assert isinstance(typed.invoke(TURNS), Forecast) and list(typed.stream(TURNS))[-1]


for family in FAMILIES:
    for protocol in ("chat", "responses"):
        model = ChatOpenAI(
            model=family, max_tokens=2000, use_responses_api=protocol == "responses", **GIVEN | {"temperature": 1}
        )
        check_family(f"{family} by {protocol}", model)
