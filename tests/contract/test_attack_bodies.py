"""The attack on a live server, which takes minutes, has a valid body for every route of today."""

from __future__ import annotations

from attack.valid import FORM, has_body
from contract.test_openapi import DOCUMENT
from support.every_route import RouteObjects
from tinsmith.api.request import PREFIX


def test_every_route_with_a_body_has_a_valid_one() -> None:
    unknown = [
        path
        for path, methods in DOCUMENT["paths"].items()
        for operation in methods.values()
        if isinstance(operation, dict) and FORM not in (content := operation.get("requestBody", {}).get("content", {}))
        if content and not has_body(path.removeprefix(PREFIX))
    ]
    assert not unknown


def test_every_path_can_be_filled_in() -> None:
    objects = RouteObjects("session", "run", "sampler", "tinker://run/weights/one", "export", "1")
    for path in DOCUMENT["paths"]:
        assert "{" not in objects.fill(path)
