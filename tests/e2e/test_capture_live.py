"""A live server captures the trajectories of agents with unmodified clients; they are training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from support.chat_models import make_tool_model
from support.live import API_KEY, LiveServer, serving
from tinsmith.errors import NotFoundError
from tinsmith.exchange.trajectories import HEADER, Trajectories, session_key

NANO, TOOLS = "tinsmith/nano", "local/tools"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    directory = tmp_path_factory.mktemp("capture")
    models = ("--model", NANO, "--model", f"{TOOLS}={make_tool_model(directory / 'tools')}")
    with serving(directory / "data", *models) as new_server:
        yield new_server


@pytest.fixture
def captured_trajectories(server: LiveServer) -> Iterator[Trajectories]:
    with Trajectories(server.url, API_KEY) as trajectories:
        yield trajectories


@pytest.mark.extended
@pytest.mark.matrix(1)
@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_a_chat_are_one_datum_with_the_logprobs_of_training(
    server: LiveServer, captured_trajectories: Trajectories, stream: bool
) -> None:
    """The template repeats earlier answers unchanged, so the second prompt begins with the first exchange."""
    session = f"chat {stream}"
    key = session_key(API_KEY, session)
    chat: list[Any] = [{"role": "user", "content": "12 + 7"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        for next_turn in ("and 5 + 6", None):
            answer: Any = client.chat.completions.create(
                model=TOOLS, messages=chat, max_tokens=40, temperature=0, stream=stream,
                extra_body={"separate_reasoning": False},
            )  # fmt: skip
            if stream:
                said = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            else:
                said = answer.choices[0].message.content
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": next_turn}]
    (trajectory,) = captured_trajectories.of(session)
    assert trajectory.num_exchanges == 2 and trajectory.versions == [TOOLS]
    assert 0 < sum(trajectory.sampled) < len(trajectory.tokens)
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        sampler = service.create_sampling_client(base_model=TOOLS).result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(trajectory.tokens)).result()
    sampled = np.array(trajectory.sampled)
    # Greedy answers have the logprobs of temperature 1.
    np.testing.assert_allclose(np.array(trajectory.logprobs)[sampled], np.array(scored, float)[sampled], atol=1e-3)
    datum = trajectory.datum(0.5)
    inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
    assert (
        datum.model_input.to_ints() == trajectory.tokens[:-1]
        and inputs["target_tokens"].tolist() == trajectory.tokens[1:]
    )
    assert inputs["advantages"].tolist() == [0.5 if is_sampled else 0.0 for is_sampled in trajectory.sampled[1:]]


def test_an_agent_of_a_model_that_thinks_has_one_trajectory(
    server: LiveServer, captured_trajectories: Trajectories
) -> None:
    """nano's template drops the thoughts of earlier turns, but captured answers keep all sampled tokens."""
    for index, kind in enumerate(("chat", "messages", "responses")):
        session = f"thinker {kind}"
        key = session_key(API_KEY, session)
        first, second = "12 + 7", f"and {index} + 6"
        if kind == "messages":
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as claude:
                arguments: dict[str, Any] = {"model": NANO, "max_tokens": 40, "extra_body": {"temperature": 0}}
                said: Any = claude.messages.create(messages=[{"role": "user", "content": first}], **arguments)
                turns = [{"role": "user", "content": first}, {"role": "assistant", "content": said.content}]
                claude.messages.create(messages=[*turns, {"role": "user", "content": second}], **arguments)  # type: ignore[list-item]
        else:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if kind == "chat":
                    chat: list[Any] = [{"role": "user", "content": first}]
                    said = client.chat.completions.create(model=NANO, messages=chat, max_tokens=40, temperature=0)
                    assert said.usage.completion_tokens_details.reasoning_tokens > 0
                    chat += [said.choices[0].message, {"role": "user", "content": second}]
                    client.chat.completions.create(model=NANO, messages=chat, max_tokens=40, temperature=0)
                else:
                    response = client.responses.create(model=NANO, input=first, max_output_tokens=40, temperature=0)
                    follow_up: dict[str, Any] = {"previous_response_id": response.id, "temperature": 0}
                    client.responses.create(model=NANO, input=second, max_output_tokens=40, **follow_up)
        (trajectory,) = captured_trajectories.of(session)
        assert trajectory.num_exchanges == 2, kind
        assert 0 < sum(trajectory.sampled) < len(trajectory.tokens)
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            sampler = service.create_sampling_client(base_model=NANO).result()
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(trajectory.tokens)).result()
        sampled = np.array(trajectory.sampled)
        np.testing.assert_allclose(np.array(trajectory.logprobs)[sampled], np.array(scored, float)[sampled], atol=1e-3)


def test_every_endpoint_captures_by_the_header_and_none_without(
    server: LiveServer, captured_trajectories: Trajectories
) -> None:
    headers = {HEADER: "by header"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, default_headers=headers, max_retries=0) as client:
        client.completions.create(model=NANO, prompt=["a", "b"], max_tokens=2)
        client.responses.create(model=NANO, input="hi", max_output_tokens=3)
        list(client.responses.create(model=NANO, input="hi", max_output_tokens=3, stream=True))
        with pytest.raises(openai.BadRequestError, match="capture session"):
            client.responses.create(model=NANO, input="hi", background=True)
    with anthropic.Anthropic(base_url=server.url, api_key=session_key(API_KEY, "by header"), max_retries=0) as claude:
        claude.messages.create(model=NANO, messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
        client.completions.create(model=NANO, prompt="c", max_tokens=2)
    trajectories = captured_trajectories.of("by header")
    assert sorted(sum(trajectory.sampled) for trajectory in trajectories) == [2, 2, 3, 3, 4]
    assert {trajectory.trajectory_id for trajectory in captured_trajectories.all()} >= {
        trajectory.trajectory_id for trajectory in trajectories
    }
    captured_trajectories.reward({trajectories[0].trajectory_id: 0.25})
    assert [trajectory.reward for trajectory in captured_trajectories.of("by header")] == [0.25, None, None, None, None]
    with pytest.raises(NotFoundError):
        captured_trajectories.reward({"traj-1000000": 1.0})
    assert captured_trajectories.delete("by header") == 5 and captured_trajectories.of("by header") == []
