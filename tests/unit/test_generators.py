"""Tests draw the same from the global generators in every run, whichever tests run before them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from support import generators


def draw() -> tuple[float, ...]:
    """One number of each global generator."""
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.fixture(scope="module")
def shared_draw() -> tuple[float, ...]:
    return draw()


def test_a_name_seeds_all_generators() -> None:
    generators.seed("a")
    first = draw()
    generators.seed("b")
    other = draw()
    generators.seed("a")
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_test_begins_with_generators_seeded_by_its_node(request: pytest.FixtureRequest) -> None:
    drawn = draw()
    generators.seed(request.node.nodeid)
    assert draw() == drawn


def test_a_shared_fixture_begins_with_generators_seeded_by_its_name(
    request: pytest.FixtureRequest, shared_draw: tuple[float, ...]
) -> None:
    module = request.node.getparent(pytest.Module)
    assert module is not None
    generators.seed(f"{module.nodeid}::shared_draw")
    assert draw() == shared_draw
