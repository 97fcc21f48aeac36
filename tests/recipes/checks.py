"""Checks of a recipe's outcome besides its exit status, combined in the table. A check takes an Outcome and fails by
assertion. No check is specific to a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tinker

from recipes.runner import Outcome
from support.live import API_KEY

Check = Callable[[Outcome], None]

# The sampler and the trainer compute the same logprobs by different routes; float32 noise is about 1e-12 in the
# squared estimate of the divergence and 1e-6 in the plain one.
SAME_DISTRIBUTION_V1 = 1e-5
SAME_DISTRIBUTION_V2 = 1e-9
# Advantages of equal rewards are zero, except for the rounding of their mean.
NO_GRADIENT = 1e-3


def logs(key: str, steps: int) -> Check:
    """The metric has a finite value in exactly this many steps."""

    def check(outcome: Outcome) -> None:
        assert len(outcome.metric_values(key)) == steps, f"{key}: {outcome.metric_values(key)}"

    return check


def first(key: str, low: float, high: float) -> Check:
    """The metric's first value lies in a range."""

    def check(outcome: Outcome) -> None:
        value = outcome.metric_values(key)[0]
        assert low <= value <= high, f"{key} begins with {value}, not within {low} and {high}"

    return check


def always(key: str, low: float, high: float) -> Check:
    """All of the metric's values lie in a range."""

    def check(outcome: Outcome) -> None:
        assert all(low <= value <= high for value in outcome.metric_values(key)), f"{key}: {outcome.metric_values(key)}"

    return check


def above(key: str, low: float) -> Check:
    """All of the metric's values are greater than `low`."""

    def check(outcome: Outcome) -> None:
        assert all(value > low for value in outcome.metric_values(key)), f"{key}: {outcome.metric_values(key)}"

    return check


def falls(key: str) -> Check:
    """The metric ends below its beginning."""

    def check(outcome: Outcome) -> None:
        values = outcome.metric_values(key)
        assert values[-1] < values[0], f"{key}: {values}"

    return check


def moves(key: str) -> Check:
    """The metric is not the same at every step."""

    def check(outcome: Outcome) -> None:
        assert len(set(outcome.metric_values(key))) > 1, f"{key}: {outcome.metric_values(key)}"

    return check


def on_policy(outcome: Outcome) -> None:
    """The trainer's logprobs of the first batch of samples match the sampler's."""
    assert abs(outcome.metric_values("optim/kl_sample_train_v1")[0]) < SAME_DISTRIBUTION_V1
    assert 0 <= outcome.metric_values("optim/kl_sample_train_v2")[0] < SAME_DISTRIBUTION_V2
    assert outcome.metric_values("optim/entropy")[0] > 0


def learns_from_contrast(outcome: Outcome) -> None:
    """A step has a gradient exactly when a group of its samples has different rewards."""
    mixed, norms = outcome.metric_values("env/all/by_group/frac_mixed"), outcome.metric_values("grad_norm")
    assert [share > 0 for share in mixed] == [norm > NO_GRADIENT for norm in norms], (mixed, norms)
    assert any(mixed), "no group was mixed: nothing could be learned"


def checkpoints(*names: str) -> Check:
    """The run logged these checkpoints; the server lists them, a trainer loads them and a sampler draws from them."""

    def check(outcome: Outcome) -> None:
        saved = {row["name"]: row for row in outcome.checkpoints()}
        assert set(saved) == set(names)
        with tinker.ServiceClient(base_url=outcome.server.url, api_key=API_KEY) as service:
            for row in saved.values():
                _use(outcome, service, row)

    return check


def checkpoint_is_deleted(name: str) -> Check:
    """The run saved this checkpoint and deleted it: its row is logged, the server no longer lists it."""

    def check(outcome: Outcome) -> None:
        row = next(row for row in outcome.checkpoints() if row["name"] == name)
        assert row["state_path"] not in _list_checkpoints(outcome, row["state_path"])

    return check


def says(text: str) -> Check:
    """The command printed this."""

    def check(outcome: Outcome) -> None:
        assert text in outcome.output, outcome.output[-3000:]

    return check


def at(directory: str, *within: Check) -> Check:
    """The checks hold for another log directory of the same command."""

    def check(outcome: Outcome) -> None:
        for inner_check in within:
            inner_check(outcome.at(directory))

    return check


def _use(outcome: Outcome, service: tinker.ServiceClient, row: dict[str, str]) -> None:
    listed = _list_checkpoints(outcome, row["state_path"])
    assert row["state_path"] in listed
    model = service.create_training_client_from_state_with_optimizer(row["state_path"]).result()
    assert model.get_info().is_lora
    if "sampler_path" not in row:
        return
    assert row["sampler_path"] in listed
    sampler = service.create_sampling_client(row["sampler_path"]).result()
    prompt = tinker.ModelInput.from_ints([40, 41, 42])
    logprobs = sampler.compute_logprobs(prompt).result()
    assert logprobs[0] is None
    assert all(logprob is not None and math.isfinite(logprob) and logprob < 0 for logprob in logprobs[1:])


def _list_checkpoints(outcome: Outcome, path: str) -> set[str]:
    """The server's checkpoints of the training run in `path`."""
    run_id = path.removeprefix("tinker://").split("/")[0]
    answer = outcome.server.get(f"training_runs/{run_id}/checkpoints")
    assert answer.status_code == 200, answer.text
    return {checkpoint["tinker_path"] for checkpoint in answer.json()["checkpoints"]}
