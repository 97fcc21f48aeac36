"""instructor against a server: for every family objects of a schema whole and in parts, by tools and formats, through
OpenAI's chat and responses and Anthropic's messages; and a conversation that calls a tool before its object.
"""

from typing import Literal

import anthropic
import instructor
import openai
from checks import FAMILIES, KEY, TOOL, URL, check
from instructor import Mode
from pydantic import BaseModel, ConfigDict


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")  # random weights would add names without end
    city: Literal["Rome", "Oslo"]
    rain: bool


SAY = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it raining?"}]
LIMITS = {"max_retries": 0, "max_tokens": 2000}
by_chat = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
by_messages = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def check_objects(name, client, family) -> None:
    request = {"model": family, "messages": SAY, **LIMITS}
    with check(f"{name}: an object"):
        forecast, answer = client.create_with_completion(response_model=Forecast, **request)
        assert isinstance(forecast, Forecast) and answer.usage
    with check(f"{name}: parts of an object"):
        parts = list(client.create_partial(response_model=Forecast, **request))
        assert parts and parts[-1].city in ("Rome", "Oslo") and parts[-1].rain is not None, parts


for family in FAMILIES:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        check_objects(f"{family} by {mode.value}", instructor.from_openai(by_chat, mode=mode), family)
    check_objects(f"{family} by messages", instructor.from_anthropic(by_messages), family)
    with check(f"{family} by responses: an object"):
        client = instructor.from_openai(by_chat, mode=Mode.RESPONSES_TOOLS)
        assert isinstance(client.create(model=family, messages=SAY, response_model=Forecast, max_retries=0), Forecast)
    with check(f"{family}: a tool's result, then an object"):
        called = by_chat.chat.completions.create(
            model=family, messages=SAY, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=2000
        )
        (call,) = called.choices[0].message.tool_calls
        turns = [
            *SAY,
            called.choices[0].message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "It is dry."},
        ]
        client = instructor.from_openai(by_chat, mode=Mode.TOOLS)
        assert isinstance(client.create(model=family, messages=turns, response_model=Forecast, **LIMITS), Forecast)
