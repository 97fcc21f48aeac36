"""langchain-openai against a server: invoke, stream, tools, logprobs, and the responses API."""

import os

from langchain_openai import ChatOpenAI

URL, KEY, NANO, TOOLS = (os.environ[name] for name in ("SERVER_URL", "SERVER_KEY", "SERVER_NANO", "SERVER_TOOLS"))
GIVEN = {"base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
WEATHER = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}

chat = ChatOpenAI(model=NANO, max_tokens=12, **GIVEN)
said = chat.invoke("Say hello.")
assert said.content and said.usage_metadata["output_tokens"] > 0
assert "".join(piece.content for piece in chat.stream("Say hello.")) == said.content
scored = chat.bind(logprobs=True).invoke("Say hello.")
assert scored.response_metadata["logprobs"]["content"]
tools = ChatOpenAI(model=TOOLS, max_tokens=120, **GIVEN).bind_tools([TOOL], tool_choice="weather")
assert tools.invoke("Is it raining?").tool_calls[0]["name"] == "weather"
newer = ChatOpenAI(model=NANO, max_tokens=12, use_responses_api=True, **GIVEN)
assert newer.invoke("Say hello.").text
