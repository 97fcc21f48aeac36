"""Captured trajectories: an agent's exchanges with the server as training data.

A request to an endpoint for OpenAI's or Anthropic's clients is captured if it names a capture session, in the header
X-Tinsmith-Session or after a '#' in its key. `store.exchanges` merges exchanges into trajectories. A datum has the
fields of the SDK's `Datum`; its advantages are the trajectory's reward at sampled tokens and 0 elsewhere.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from pydantic import Field

from tinsmith.api.access import Access
from tinsmith.api.declaration import operation
from tinsmith.api.openapi import ANYTHING, COUNT, FLAG, LIST, NUMBER, TEXT, fields, listing
from tinsmith.api.request import Call, JsonObject
from tinsmith.errors import RequestError, UserError
from tinsmith.store.exchanges import Trajectory
from tinsmith.wire.fields import ClosedBody, Number, Query, Text, iso
from tinsmith.wire.images import chunks_of

MAX_LIMIT, DEFAULT_LIMIT = 100, 20
TRAJECTORY = fields(
    {"trajectory_id": TEXT, "session": TEXT, "tokens": LIST, "sampled": LIST, "logprobs": LIST, "datum": ANYTHING},
    {"reward": NUMBER},
)


class TrajectoriesQuery(Query):
    session: Text | None = None
    after: Text | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT


@listing(
    "/trajectories",
    "List captured trajectories of one session or a page of sessions",
    answer=fields({"trajectories": {"type": "array", "items": TRAJECTORY}, "has_more": FLAG}, {"next_after": TEXT}),
    query=TrajectoriesQuery,
    filters=("?session={capture}", "?after={capture}"),
)
def trajectories(call: Call, query: TrajectoriesQuery) -> JsonObject:
    exchanges = call.services.exchanges
    if query.session is not None:
        if query.after is not None:
            raise RequestError("after", "session and after are both given; send one of them")
        captured = exchanges.trajectories(call.tenant_id, query.session)
        return {
            "trajectories": [trajectory_body(trajectory) for trajectory in captured],
            "has_more": False,
            "next_after": None,
        }
    page, next_after = exchanges.page(call.tenant_id, query.limit, query.after or "")
    listed = [trajectory_body(trajectory) for trajectory in page]
    return {"trajectories": listed, "has_more": next_after is not None, "next_after": next_after}


def trajectory_body(trajectory: Trajectory) -> JsonObject:
    return {
        "trajectory_id": trajectory.trajectory_id,
        "session": trajectory.session,
        "reward": trajectory.reward,
        "created_at": iso(trajectory.created_at),
        "versions": trajectory.versions,
        "version_spans": [asdict(span) for span in trajectory.spans],
        "exchanges": trajectory.num_exchanges,
        "stop_reason": trajectory.stop_reason,
        "tokens": trajectory.tokens,
        "sampled": trajectory.sampled,
        "logprobs": trajectory.logprobs,
        "datum": datum(trajectory),
    }


def datum(trajectory: Trajectory) -> JsonObject:
    """Return the fields of a Datum for reinforcement-learning losses."""
    tokens, reward = trajectory.tokens, trajectory.reward or 0.0
    advantages = [reward if sampled else 0.0 for sampled in trajectory.sampled[1:]]
    return {
        "model_input": {"chunks": chunks_of(tokens[:-1], trajectory.images)},
        "loss_fn_inputs": {
            "target_tokens": _tensor(tokens[1:], "int64"),
            "logprobs": _tensor(trajectory.logprobs[1:], "float32"),
            "advantages": _tensor(advantages, "float32"),
        },
    }


def _tensor(data: list[int] | list[float], dtype: str) -> JsonObject:
    return {"data": data, "dtype": dtype, "shape": [len(data)]}


class RewardBody(ClosedBody):
    trajectory_id: Text
    reward: Number


class RewardsRequest(ClosedBody):
    rewards: Annotated[list[RewardBody], Field(min_length=1, max_length=10_000)]


@operation(
    "POST",
    "/trajectories/rewards",
    "Set rewards of trajectories",
    body=RewardsRequest,
    answer=fields({"updated": COUNT}),
    example={"rewards": [{"trajectory_id": "{trajectory_id}", "reward": 1.0}]},
)
def rewards(call: Call, request: RewardsRequest) -> JsonObject:
    """Set all rewards or, on an error, none."""
    reward_by_id = {reward.trajectory_id: reward.reward for reward in request.rewards}
    if len(reward_by_id) < len(request.rewards):
        raise UserError("rewards names a trajectory twice")
    call.services.exchanges.set_rewards(call.tenant_id, reward_by_id)
    return {"updated": len(reward_by_id)}


class SessionQuery(Query):
    session: Annotated[Text, Field(description="the session to delete")]


@operation(
    "DELETE",
    "/trajectories",
    "Delete the trajectories of a session",
    answer=fields({"deleted": COUNT}),
    access=Access.LISTING,
    query=SessionQuery,
)
def delete(call: Call, query: SessionQuery) -> JsonObject:
    return {"deleted": call.services.exchanges.delete(call.tenant_id, query.session)}
