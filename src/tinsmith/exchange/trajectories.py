"""Client of captured trajectories: read them as the SDK's data, and send rewards.

`session_key` makes a key under which an unmodified agent is captured. Knows HTTP and the SDK's types.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from tinsmith.errors import refusal
from tinsmith.runtime import notebook

if TYPE_CHECKING:
    import tinker

TIMEOUT_S = 60.0
HEADER = "X-Tinsmith-Session"


def session_key(api_key: str, session: str) -> str:
    """A key for an agent with no other configuration: its requests are captured under this session."""
    return f"{api_key}#{session}"


@dataclass(frozen=True, slots=True)
class CapturedTrajectory:
    """`sampled[i]`: whether token i was sampled, by one of `versions`; `logprobs[i]`: its logprob at that time.

    `version_spans` has for each answer the name of its weights and its tokens: `version`, `start` and `stop`. `chunks`
    are all tokens but the last as JSON of the SDK's chunks, with the prompt's images.
    """

    trajectory_id: str
    session: str
    reward: float | None
    versions: list[str]
    num_exchanges: int
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    version_spans: list[dict[str, Any]]
    chunks: list[dict[str, Any]]

    def __repr__(self) -> str:
        return (
            f"CapturedTrajectory({self.trajectory_id!r}, session={self.session!r}, reward={self.reward}, "
            f"{len(self.tokens)} tokens, {sum(self.sampled)} sampled, {self.num_exchanges} exchanges)"
        )

    def _repr_html_(self) -> str:
        fields = {
            "Session": self.session,
            "Reward": self.reward,
            "Exchanges": self.num_exchanges,
            "Tokens": f"{len(self.tokens):,}, of which {sum(self.sampled):,} were sampled",
            "Weights": ", ".join(self.versions),
        }
        return notebook.card(f"Trajectory {self.trajectory_id}", fields)

    def datum(self, advantage: float) -> tinker.Datum:
        """For importance_sampling, ppo and similar losses: the advantage at every sampled token, and 0 elsewhere."""
        import numpy as np
        from tinker import types

        advantages = np.where(self.sampled[1:], np.float32(advantage), np.float32(0)).astype(np.float32)
        arrays = {
            "target_tokens": np.array(self.tokens[1:]),
            "logprobs": np.array(self.logprobs[1:], np.float32),
            "advantages": advantages,
        }
        chunks = [
            types.ImageChunk(
                data=base64.b64decode(chunk["data"]), format=chunk["format"], expected_tokens=chunk["expected_tokens"]
            )
            if chunk["type"] == "image"
            else types.EncodedTextChunk(tokens=chunk["tokens"])
            for chunk in self.chunks
        ]
        return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=arrays)  # pyright: ignore[reportArgumentType]


class Trajectories:
    """The trajectories of one key's tenant."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url.rstrip('/')}/api/v1/trajectories"
        self._http = httpx.Client(headers={"X-API-Key": api_key}, timeout=TIMEOUT_S)

    def of(self, session: str) -> list[CapturedTrajectory]:
        return [_read(record) for record in self._request("GET", "", params={"session": session})["trajectories"]]

    def all(self) -> Iterator[CapturedTrajectory]:
        """The trajectories of every session, in pages."""
        params: dict[str, str] = {}
        while True:
            page = self._request("GET", "", params=params)
            yield from map(_read, page["trajectories"])
            if not page["has_more"]:
                return
            params = {"after": page["next_after"]}

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Set rewards by trajectory id. Raises NotFoundError."""
        entries = [{"trajectory_id": trajectory_id, "reward": reward} for trajectory_id, reward in rewards.items()]
        self._request("POST", "/rewards", json={"rewards": entries})

    def delete(self, session: str) -> int:
        return self._request("DELETE", "", params={"session": session})["deleted"]

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Trajectories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:  # noqa: ANN401  httpx's own
        answer = self._http.request(method, self._url + path, **options)
        if answer.is_success:
            return answer.json()
        raise refusal(answer.status_code, answer.text)


def _read(record: Mapping[str, Any]) -> CapturedTrajectory:
    names = ("trajectory_id", "session", "reward", "versions", "tokens", "sampled", "logprobs", "version_spans")
    chunks = record["datum"]["model_input"]["chunks"]
    return CapturedTrajectory(
        num_exchanges=record["exchanges"], chunks=chunks, **{name: record[name] for name in names}
    )
