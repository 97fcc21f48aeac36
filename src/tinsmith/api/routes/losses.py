"""Custom losses: a traced loss is checked and stored; forward_backward then names it."""

from __future__ import annotations

from contextlib import suppress

import orjson
from starlette.routing import Route

from tinsmith.api.admission import check_position
from tinsmith.api.operation import Call, JsonObject, endpoint
from tinsmith.errors import NotFoundError, SeqIdTakenError, UserError
from tinsmith.losses.graphs import check_graph
from tinsmith.store.custom_losses import MAX_DEFINITION_BYTES, MAX_LOSSES, NewCustomLoss, insertion
from tinsmith.store.futures import NewFuture
from tinsmith.wire.bodies import JSON_TYPE
from tinsmith.wire.custom_loss import create_custom_loss_of


def create_custom_loss(call: Call) -> JsonObject:
    """No device is needed, so the future is done, or refused, at birth."""
    services, fields = call.services, call.fields()
    session = services.sessions.require_active(call.tenant_id, fields.text("session_id"))
    number = check_position("custom_loss_seq_id", fields.integer("custom_loss_seq_id"))
    loss_id = f"{session.session_id}:loss:{number}"
    new = NewFuture(
        request_id=loss_id,
        tenant_id=call.tenant_id,
        session_id=session.session_id,
        base_model="",  # no engine's
        kind="create_custom_loss",
        body=call.body,
    )
    try:
        if number >= MAX_LOSSES:
            raise UserError(f"custom_loss_seq_id is {number}; a session may create at most {MAX_LOSSES} custom losses")
        asked = create_custom_loss_of(fields)
        if len(asked.definition) > MAX_DEFINITION_BYTES:
            raise UserError(f"graph and inputs are {len(asked.definition)} bytes; at most {MAX_DEFINITION_BYTES}")
        check_graph(asked.loss)
    except UserError as error:
        return {"request_id": services.futures.submit(new, error)}
    stored = NewCustomLoss(loss_id, session.session_id, call.tenant_id, asked.loss.name, asked.definition)
    answer = orjson.dumps({"loss_id": loss_id, "type": "create_custom_loss"})
    request_id = services.futures.record(new, answer, [insertion(stored)])
    with suppress(NotFoundError):  # the number was used for a loss that was refused, and the future says why
        if services.custom_losses.get(session.session_id, loss_id) != asked.definition:
            raise SeqIdTakenError(
                f"custom_loss_seq_id {number} belongs to another loss; only the very same loss may be sent again under "
                "its number, so use the next one"
            )
    return {"request_id": request_id}


ROUTES = [Route("/create_custom_loss", endpoint(create_custom_loss, JSON_TYPE), methods=["POST"])]
