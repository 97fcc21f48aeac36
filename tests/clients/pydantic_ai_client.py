"""pydantic-ai against a server: an agent by OpenAI's chat, by responses and by Anthropic's messages."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, NANO = (os.environ[name] for name in ("SERVER_URL", "SERVER_KEY", "SERVER_NANO"))
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
for model in (
    OpenAIChatModel(NANO, provider=openai),
    OpenAIResponsesModel(NANO, provider=openai),
    AnthropicModel(NANO, provider=AnthropicProvider(base_url=URL, api_key=KEY)),
):
    answered = Agent(model).run_sync("Say hello.", model_settings={"max_tokens": 40, "temperature": 0.0})
    assert answered.output, type(model).__name__
