"""langchain-openai against a server: invoke, stream, tools, logprobs, and the responses API."""

from checks import KEY, NANO, TOOL, TOOLS, URL, check
from langchain_openai import ChatOpenAI

GIVEN = {"base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}

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
