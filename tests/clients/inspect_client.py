"""inspect-ai against a server: through its providers openai/ and openai-api/ evaluations of a sample, of an agent with
a tool, and of an answer of a schema; and through tinker-cookbook's provider for samplers of the Tinker API."""

import os
import tempfile
from typing import Literal

from checks import FAMILIES, KEY, NANO, URL, check

os.environ |= {"TINSMITH_API_KEY": KEY, "TINSMITH_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY}
os.environ |= {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": URL, "HF_ENDPOINT": f"{URL}/hub", "HF_TOKEN": KEY}

import tinker
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Model,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolCall, ToolFunction, tool
from inspect_ai.util import json_schema
from pydantic import BaseModel
from tinker_cookbook.eval.inspect_utils import InspectAPIFromTinkerSampling


class Forecast(BaseModel, extra="forbid"):
    city: str
    rain: bool


@tool
def weather():
    async def execute(city: Literal["Rome", "Oslo"]) -> str:
        """Look up the weather of a city.

        Args:
            city: its name
        """
        return f"It is dry in {city}."

    return execute


OPENAI = {"base_url": f"{URL}/v1", "api_key": KEY}
TEXT = Sample(input="Say hello.", target="hello")
HISTORY = [
    ChatMessageUser(content="Is it raining?"),
    ChatMessageAssistant(content="", tool_calls=[ToolCall(id="a", function="weather", arguments={"city": "Rome"})]),
    ChatMessageTool(content="It is dry.", tool_call_id="a", function="weather"),
]


def evaluate(model, sample, *, solver=None, **config):
    task = Task(dataset=[sample], scorer=includes(ignore_case=True), solver=solver or generate(), message_limit=12)
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, log_dir=logs, display="none", **config)
        assert log.status == "success", log.error
        return log.samples[0]


for name, model in (
    ("openai-api", get_model(f"openai-api/tinsmith/{NANO}")),
    ("openai by chat", get_model(f"openai/{NANO}", responses_api=False, **OPENAI)),
    ("openai by responses", get_model(f"openai/{NANO}", responses_api=True, **OPENAI)),
):
    with check(name):
        evaluate(model, TEXT, max_tokens=40)
for family in FAMILIES:
    for protocol in ("chat", "responses"):
        model = get_model(f"openai/{family}", responses_api=protocol == "responses", **OPENAI)
        with check(f"{family} by {protocol}: a forced call"):
            solver = [use_tools(weather(), tool_choice=ToolFunction("weather")), generate(tool_calls="single")]
            roles = [message.role for message in evaluate(model, TEXT, solver=solver, max_tokens=4000).messages]
            assert "tool" in roles, roles
        with check(f"{family} by {protocol}: a tool's result in the history"):
            sample = Sample(input=HISTORY, target="x")
            evaluate(model, sample, solver=[use_tools(weather(), tool_choice="none"), generate()], max_tokens=400)
        with check(f"{family} by {protocol}: an answer of a schema"):
            schema = ResponseSchema(name="forecast", json_schema=json_schema(Forecast))
            answer = evaluate(model, TEXT, max_tokens=4000, response_schema=schema).output.completion
            assert Forecast.model_validate_json(answer)

service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model=NANO)


def new_tinker_model(**options) -> Model:
    config = GenerateConfig(max_tokens=40, temperature=0.0)
    return Model(InspectAPIFromTinkerSampling("qwen3_disable_thinking", NANO, config=config, **options), config)


with check("Tinker's provider"):
    assert evaluate(new_tinker_model(sampling_client=sampler), TEXT).output.usage.output_tokens > 0
with check("Tinker's provider: a tool and its result"):
    sample = Sample(input=HISTORY, target="x")
    solver = [use_tools(weather()), generate(tool_calls="none")]
    evaluate(new_tinker_model(sampling_client=sampler), sample, solver=solver, num_choices=2)
with check("Tinker's provider: a saved sampler"):
    training = service.create_lora_training_client(NANO, rank=4)
    saved = training.save_weights_for_sampler("inspect").result()
    evaluate(new_tinker_model(model_path=saved.path, api_key=KEY, include_reasoning=True), TEXT)
