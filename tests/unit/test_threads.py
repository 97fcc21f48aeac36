"""The number of threads of a forward pass, by the size of the model and the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith.backends.torch.model import AWAKE_SPINS, NARROW_FLOPS, SMALL_FORWARD_FLOPS, SMALL_SHARED_FLOPS, Threads


@pytest.fixture
def two() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("num_parameters", "num_adapters", "spins", "small_flops"),
    [
        (int(NARROW_FLOPS / 4), 100_000, 0, SMALL_SHARED_FLOPS),
        (int(NARROW_FLOPS / 40), 2, 0, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS / 4), 1, AWAKE_SPINS, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 100_000, AWAKE_SPINS - 1, SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 1, "infinite", SMALL_FORWARD_FLOPS),
        (int(NARROW_FLOPS), 1, AWAKE_SPINS, 0.0),
    ],
    ids=[
        "narrow and shared by many",
        "narrow, with many tokens each",
        "narrow, of one",
        "wide",
        "wide, other",
        "wide, awake",
    ],
)
def test_small_forwards_get_one_thread_and_others_all(
    num_parameters: int, num_adapters: int, spins: int | str, small_flops: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", str(spins))
    threads = Threads(num_parameters, torch.device("cpu"))
    most = int(small_flops / (2 * num_parameters))
    small = 1 if most else 2
    below = max(most - 1, 1)
    for num_tokens, wanted in ((1, small), (below, small), (most + 1, 2), (below, small), (100 * below + 100, 2)):
        threads.fit(num_tokens, num_adapters)
        assert torch.get_num_threads() == wanted
