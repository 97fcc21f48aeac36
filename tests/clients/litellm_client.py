"""litellm against a server: chat, stream, tools, responses, Anthropic's messages, token ids through its extra body."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # instead of one from the network

import litellm
from checks import KEY, NANO, SAY, TOOL, TOOLS, URL, check

OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 12, "temperature": 0, "num_retries": 0}

answer = litellm.completion(model=f"openai/{NANO}", messages=SAY, logprobs=True, **OPENAI)
said = answer.choices[0].message.content
with check("chat"):
    assert said and answer.usage.completion_tokens > 0 and answer.choices[0].logprobs.content
with check("stream"):
    chunks = litellm.completion(model=f"openai/{NANO}", messages=SAY, stream=True, **OPENAI)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
with check("token ids"):
    ids = litellm.completion(model=f"openai/{NANO}", messages=SAY, extra_body={"return_token_ids": True}, **OPENAI)
    assert len(ids.choices[0].message.content) > 0 and ids.usage.completion_tokens == answer.usage.completion_tokens
with check("tools"):
    called = litellm.completion(
        model=f"openai/{TOOLS}", messages=SAY, tools=[TOOL], tool_choice="required", **(OPENAI | {"max_tokens": 80})
    )
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
with check("text completion"):
    text = litellm.text_completion(model=f"text-completion-openai/{NANO}", prompt="a", **OPENAI)
    assert text.choices[0].finish_reason in ("length", "stop")
with check("responses"):
    response = litellm.responses(
        model=f"openai/{NANO}", input="Say hello.", api_base=f"{URL}/v1", api_key=KEY, max_output_tokens=12
    )
    assert response.status in ("completed", "incomplete")
with check("Anthropic's messages"):
    message = litellm.completion(model=f"anthropic/{NANO}", messages=SAY, api_base=URL, api_key=KEY, max_tokens=12)
    assert message.choices[0].finish_reason in ("length", "stop")
with check("an unknown model is an error"):
    try:
        litellm.completion(model="openai/unknown", messages=SAY, **OPENAI)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("no error")
