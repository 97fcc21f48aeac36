"""Profiles of running engines, which operators start and stop; `tinsmith profile` does the same in the database.

An engine begins within about a second, between two steps, and `cluster.profiles` has the states.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

from pydantic import Field

from tinsmith.api.access import Access
from tinsmith.api.declaration import operation
from tinsmith.api.openapi import LIST, NUMBER, TEXT, TEXTS, fields, one_of
from tinsmith.api.request import Call, JsonObject
from tinsmith.cluster.profiles import FAILED, FINISHED, MAX_PROFILE_S, PROFILE_S, REQUESTED, STOPPING, TRACING
from tinsmith.wire.fields import ClosedBody, Schema, Text

_for_operators = partial(operation, access=Access.OPERATOR)
PROFILE: Schema = fields(
    {"base_model": TEXT, "state": one_of(REQUESTED, TRACING, STOPPING, FINISHED, FAILED), "seconds": NUMBER}
    | {"requested_at": NUMBER, "files": TEXTS},
    {"host": TEXT, "reason": TEXT},
)
_for_profiles = partial(_for_operators, answer=PROFILE, errors=(403, 404))


class StartProfileRequest(ClosedBody):
    base_model: Text
    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_S)] = PROFILE_S


class StopProfileRequest(ClosedBody):
    base_model: Text


@_for_operators("GET", "/operator/profiles", "The last profile of each base model", answer=fields({"profiles": LIST}))
def profiles(call: Call) -> JsonObject:
    return {"profiles": [asdict(profile) for profile in call.services.profiles.all()]}


@_for_profiles(
    "POST",
    "/operator/start_profile",
    "Have a base model's engine trace its next steps",
    body=StartProfileRequest,
    example={"base_model": "{base_model}"},
)
def start_profile(call: Call, request: StartProfileRequest) -> JsonObject:
    call.services.bases.get(request.base_model)
    return asdict(call.services.profiles.request(request.base_model, request.seconds))


@_for_profiles("POST", "/operator/stop_profile", "End a profile early", body=StopProfileRequest)
def stop_profile(call: Call, request: StopProfileRequest) -> JsonObject:
    return asdict(call.services.profiles.stop(request.base_model))
