"""How many messages a protobuf body holds, counted before it is parsed: each is allocated, however small it is.

An empty message takes 2 bytes of a body and 60 of memory. Knows the wire format and the message types, and
nothing of what they mean. What is malformed is left to the parser to say.
"""

from __future__ import annotations

from typing import cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tinsmith.errors import UserError

MAX_MESSAGES = 2**18
FREE_BYTES = 6 << 20
"""Bodies up to this size are not counted: what they can hold is bearable, and the SDK's are smaller."""

MAX_VARINT_BYTES = 10
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5


def check_messages(body: bytes, kind: type[Message]) -> None:
    """Raise UserError if a body of this message type holds more messages than are taken."""
    if len(body) <= FREE_BYTES:
        return
    if _count(body, cast(Descriptor, kind.DESCRIPTOR), MAX_MESSAGES) > MAX_MESSAGES:
        raise UserError(f"the body holds more than {MAX_MESSAGES} protobuf messages; send fewer data per request")


def _count(body: bytes, kind: Descriptor, most: int) -> int:
    """The messages in `body`, or more than `most`; those up to the first malformed byte."""
    found = 0
    todo = [(kind, 0, len(body))]
    while todo and found <= most:
        kind, at, end = todo.pop()
        inner = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
        while at < end and found <= most:
            tag, at = _varint(body, at)
            wire_type = tag & 7
            if wire_type == VARINT:
                _, at = _varint(body, at)
            elif wire_type == DELIMITED:
                size, at = _varint(body, at)
                if (of := inner.get(tag >> 3)) is not None:
                    found += 1
                    todo.append((of, at, min(at + size, end)))
                at += size
            elif wire_type in (FIXED32, FIXED64):
                at += 4 if wire_type == FIXED32 else 8
            else:
                return found
    return found


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number at a position, and the position behind it; one that does not end leads behind the body."""
    value = 0
    for index, byte in enumerate(body[at : at + MAX_VARINT_BYTES]):
        if byte < 128:
            return value | byte << (7 * index), at + index + 1
        value |= (byte & 127) << (7 * index)
    return 0, len(body)
