"""pydantic-ai against a server: an agent through OpenAI's chat, responses and Anthropic's messages."""

from checks import KEY, NANO, URL, check
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
for name, model in (
    ("OpenAI's chat", OpenAIChatModel(NANO, provider=openai)),
    ("OpenAI's responses", OpenAIResponsesModel(NANO, provider=openai)),
    ("Anthropic's messages", AnthropicModel(NANO, provider=AnthropicProvider(base_url=URL, api_key=KEY))),
):
    with check(name):
        answered = Agent(model).run_sync("Say hello.", model_settings={"max_tokens": 40, "temperature": 0.0})
        assert answered.output
