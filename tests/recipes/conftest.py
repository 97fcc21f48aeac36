"""The working directory and the server that the selected recipes need, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.table import Row
from recipes.workplace import MODELS, make_workplace
from support.live import LiveServer, serving


@pytest.fixture(scope="session")
def recipe_models(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The models that the selected tests of this package need; each takes one process of the server."""
    needed_models: set[str] = {"local/tiny"}
    for item in request.session.items:
        parameters = (
            item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
        )
        needed_models.update(model for value in parameters if isinstance(value, Row) for model in value.models)
    return tuple(name for name in MODELS if name in needed_models)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, recipe_models: tuple[str, ...]) -> Path:
    """A directory with the recipes' tokenizers and data sets, for machines without internet."""
    directory = tmp_path_factory.mktemp("recipes")
    make_workplace(directory, recipe_models)
    return directory


@pytest.fixture(scope="session")
def recipe_server(
    tmp_path_factory: pytest.TempPathFactory, workplace: Path, recipe_models: tuple[str, ...]
) -> Iterator[LiveServer]:
    """A live server with the torch backend, a process for each model."""
    served = [argument for name in recipe_models for argument in ("--model", f"{name}={workplace / name}")]
    with serving(tmp_path_factory.mktemp("recipe_server") / "data", *served) as server:
        yield server
