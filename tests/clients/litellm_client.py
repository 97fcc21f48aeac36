"""litellm against a server: chat, stream, tools, responses, Anthropic's messages, token ids through its extra body."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # instead of one from the network

import litellm

URL, KEY, NANO, TOOLS = (os.environ[name] for name in ("SERVER_URL", "SERVER_KEY", "SERVER_NANO", "SERVER_TOOLS"))
SAY = [{"role": "user", "content": "Say hello."}]
OPENAI = {"api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 12, "temperature": 0, "num_retries": 0}
CITY = {"city": {"enum": ["Rome", "Oslo"]}}
WEATHER = {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False}

whole = litellm.completion(model=f"openai/{NANO}", messages=SAY, logprobs=True, **OPENAI)
said = whole.choices[0].message.content
assert said and whole.usage.completion_tokens > 0 and whole.choices[0].logprobs.content
pieces = litellm.completion(model=f"openai/{NANO}", messages=SAY, stream=True, **OPENAI)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said
ids = litellm.completion(model=f"openai/{NANO}", messages=SAY, extra_body={"return_token_ids": True}, **OPENAI)
assert len(ids.choices[0].message.content) > 0 and ids.usage.completion_tokens == whole.usage.completion_tokens
tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
called = litellm.completion(
    model=f"openai/{TOOLS}", messages=SAY, tools=[tool], tool_choice="required", **(OPENAI | {"max_tokens": 80})
)
assert called.choices[0].message.tool_calls[0].function.name == "weather"
text = litellm.text_completion(model=f"text-completion-openai/{NANO}", prompt="a", **OPENAI)
assert text.choices[0].finish_reason in ("length", "stop")
response = litellm.responses(
    model=f"openai/{NANO}", input="Say hello.", api_base=f"{URL}/v1", api_key=KEY, max_output_tokens=12
)
assert response.status in ("completed", "incomplete")
message = litellm.completion(model=f"anthropic/{NANO}", messages=SAY, api_base=URL, api_key=KEY, max_tokens=12)
assert message.choices[0].finish_reason in ("length", "stop")
try:
    litellm.completion(model="openai/unknown", messages=SAY, **OPENAI)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model is an error")
