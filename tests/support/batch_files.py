"""Files of requests that a batch takes."""

from __future__ import annotations

import json

from tinsmith.batch.openai import ENDPOINTS

REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": ENDPOINTS[0],
    "body": {"model": "tinsmith/nano", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
}
REQUEST_LINE = json.dumps(REQUEST).encode() + b"\n"


def lines_of_size(size: int) -> bytes:
    """A file of one request with so many bytes. Raises AssertionError for a size that no request has."""
    assert size >= len(REQUEST_LINE)
    return REQUEST_LINE[:-1].ljust(size - 1) + b"\n"
