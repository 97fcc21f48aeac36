"""Mutations of requests, by name. Each takes a valid request and a random source, and returns the broken field."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from urllib.parse import quote

import zstandard

from attack.sending import Request
from attack.valid import FORM, JSON, PROTO, with_query
from fuzz.test_fuzz_http import NASTY

MIB = 1 << 20
LONG = 300_000
OTHERS: tuple[object, ...] = (None, True, 0, 1, -1, 1.5, "x", "", [], {}, [[]], {"a": {}}, [None], "1")
NUMBERS = (
    "-1", "-0", "0.1", "1e5", "1e-400", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "2147483648",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616", "9" * 4000, "00",
)  # fmt: skip
TEXTS = (*NASTY, "\ud800", "a\x00b", "x" * LONG, "../" * 500, "\u200b", "tinker://../../../etc/passwd", "file:///etc")
RANGES = (b"bytes=5-2", b"bytes=-", b"bytes=0-9999999999999999999", b"x", b"bytes=0-0,1-1")
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """`field` is the name of the JSON field that was changed, if the body is still JSON."""

    request: Request
    kind: str
    field: str | None = None


class Raw(str):
    """Raw JSON text."""


@dataclass(frozen=True, slots=True)
class Twice:
    """A field that an object has twice."""

    first: object
    second: object


def write_json(value: object) -> str:
    """JSON of values that may be Raw, with fields that may be repeated (Twice)."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pairs: list[tuple[str, object]] = []
        for name, member in value.items():
            pairs += [(name, member.first), (name, member.second)] if isinstance(member, Twice) else [(name, member)]
        return "{" + ",".join(f"{json.dumps(name)}:{write_json(member)}" for name, member in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_json, value)) + "]"
    return json.dumps(value)


def paths_of(value: object, prefix: Path = ()) -> Iterator[Path]:
    """The place of every value inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield (*prefix, name)
        yield from paths_of(child, (*prefix, name))


def change_field(request: Request, rng: random.Random, kind: str) -> Broken:
    """A JSON body with one wrong or missing field."""
    body = json.loads(request.body)
    root: dict[str, object] = {"": body}
    paths = [("", *path) for path in paths_of(body)] or [("",)]
    *above, last = rng.choice(paths)
    parent: object = root
    for name in above:
        parent = parent[name]  # type: ignore[index]
    assert isinstance(parent, dict | list)
    value = parent[last]  # type: ignore[index]
    if kind == "a field is dropped":
        if above:
            del parent[last]  # type: ignore[arg-type]
    elif kind == "a field is unknown":
        inside = body if isinstance(body, dict) else {}
        inside[f"unknown_{rng.randrange(100)}"] = rng.choice(OTHERS)
    elif kind == "a field is there twice" and above and isinstance(parent, dict):
        parent[last] = Twice(value, rng.choice([value, *OTHERS]))
    else:
        parent[last] = _other(value, rng, kind)  # type: ignore[index]
    names = [step for step in (*above, last) if isinstance(step, str) and step]
    text = write_json(root[""]).encode("utf-8", "surrogatepass")
    return Broken(replace(request, body=text), kind, names[-1] if names else None)


def _other(value: object, rng: random.Random, kind: str) -> object:
    if kind == "a number is out of range":
        return Raw(rng.choice(NUMBERS))
    if kind == "a text is strange":
        return rng.choice(TEXTS)
    if kind == "a field is nested":
        deep = rng.choice([60, 1000, 100_000])
        return rng.choice([[value], {"x": value}, Raw("[" * deep + "]" * deep), Raw('{"a":' * deep + "1" + "}" * deep)])
    return rng.choice([other for other in OTHERS if type(other) is not type(value)])


FIELD_KINDS = (
    "a field has another type",
    "a field is dropped",
    "a field is there twice",
    "a field is nested",
    "a field is unknown",
    "a number is out of range",
    "a text is strange",
)


def broken_body(request: Request, rng: random.Random) -> Broken:
    """Corrupt the bytes of a body."""
    body = request.body
    at = rng.randrange(len(body) + 1)
    noise = rng.randbytes(rng.choice([1, 4, 50, 5000]))
    kinds: dict[str, bytes] = {
        "the body is cut": body[:at],
        "the body is no UTF-8": body[:at] + rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8"]) + body[at:],
        "bytes of the body are others": body[:at] + noise + body[at + len(noise) :],
        "the body is noise": noise,
        "the body is empty": b"",
        "the body has a mark before it": b"\xef\xbb\xbf" + body,
        "the body is no object": rng.choice([b"[]", b"1", b"null", b'"x"', b"[{}]", b" ", b"NaN", b"{}{}", b"{} x"]),
        "the body is UTF-16": body.decode("latin-1").encode("utf-16"),
        "the body is deep": b'{"a":' + b"[" * 200_000,
        "the body is wide": b'{"a":[' + b",".join([b"[]"] * 300_000) + b"]}",
    }
    kind = rng.choice(list(kinds))
    return Broken(replace(request, body=kinds[kind]), kind)


@cache
def bombs() -> tuple[bytes, bytes]:
    """A few kilobytes that decompress to 200 MiB, and some of 100 MiB whose frame does not declare the size."""
    compressor = zstandard.ZstdCompressor().compressobj()
    sly = compressor.compress(b"[" * 100 * MIB) + compressor.flush()
    return zstandard.ZstdCompressor().compress(b"\0" * 200 * MIB), sly


def broken_encoding(request: Request, rng: random.Random) -> Broken:
    """An unknown Content-Encoding or Content-Type, or a wrong one for the body."""
    packed = zstandard.ZstdCompressor().compress(request.body)
    bomb, sly = bombs()
    kinds: dict[str, tuple[bytes, bytes]] = {
        "zstd, as allowed": (b"zstd", packed),
        "zstd, and it is not": (b"zstd", request.body),
        "zstd, cut": (b"zstd", packed[: len(packed) // 2]),
        "zstd, and more behind it": (b"zstd", packed + packed),
        "zstd, a bomb": (b"zstd", bomb),
        "zstd, a bomb that hides its size": (b"zstd", sly),
        "zstd, twice": (b"zstd, zstd", zstandard.ZstdCompressor().compress(packed)),
        "gzip": (b"gzip", request.body),
        "a strange encoding": (rng.randbytes(8).hex().encode(), request.body),
    }
    if rng.random() < 0.3:
        types = [
            b"text/plain",
            b"",
            b"application/json, text/html",
            b"x" * 3000,
            b"\xff/\xfe",
            PROTO,
            JSON,
            FORM.encode(),
        ]
        content_type = rng.choice(types)
        return Broken(replace(request, headers=request.with_header(b"Content-Type", content_type)), "a wrong type")
    kind = rng.choice(list(kinds))
    encoding, body = kinds[kind]
    return Broken(replace(request, headers=request.with_header(b"Content-Encoding", encoding), body=body), kind)


def broken_framing(request: Request, rng: random.Random) -> Broken:
    """A body that is longer or shorter than its headers declare, or whose headers contradict each other."""
    size = len(request.body)
    lengths: dict[str, list[bytes]] = {
        "Content-Length is too large": [b"%d" % (size + rng.choice([1, 1000, 2**40]))],
        "Content-Length is too small": [b"%d" % max(0, size - 1)],
        "Content-Length is negative": [b"-1"],
        "Content-Length is no number": [b"0x10"],
        "Content-Length is huge": [b"9" * 400],
        "Content-Length is there twice": [b"%d" % size, b"%d" % (size + 1)],
    }
    kind = rng.choice([*lengths, "chunks", "chunks and a length", "broken chunks", "an unknown Transfer-Encoding"])
    if kind == "chunks":
        return Broken(replace(request, framing="chunked"), kind)
    coded = {"chunks and a length": b"chunked", "broken chunks": b"chunked", "an unknown Transfer-Encoding": b"zip"}
    added = [(b"Content-Length", value) for value in lengths.get(kind, [b"5"] if kind == "chunks and a length" else [])]
    if kind in coded:
        added.append((b"Transfer-Encoding", coded[kind]))
    body = b"zz\r\n" + request.body if kind == "broken chunks" else request.body
    return Broken(replace(request, headers=(*request.headers, *added), framing="none", body=body, halts=True), kind)


def broken_headers(request: Request, rng: random.Random) -> Broken:
    noise = bytes(rng.randrange(1, 256) for _ in range(rng.choice([3, 30, 3000])))
    clean = noise.replace(b"\r", b"").replace(b"\n", b"")
    kinds: dict[str, list[tuple[bytes, bytes]]] = {
        "many headers": [(b"X-%d" % index, b"x") for index in range(500)],
        "a long header": [(b"X-Long", b"x" * 60_000)],
        "a head that is too long": [(b"X-Long", b"x" * 200_000)],
        "noise in a header": [(b"X-Noise", clean)],
        "a header with a name of noise": [(clean[:20] or b"x", b"x")],
        "two hosts": [(b"Host", b"example.com")],
        "a range": [(b"Range", rng.choice(RANGES))],
        "a strange trace": [(b"traceparent", rng.choice([clean[:50], b"00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-01"]))],
        "a strange idempotency key": [(b"X-Idempotency-Key", rng.choice([clean[:200], b"../..", b"x" * 9000, b""]))],
        "an upgrade": [(b"Upgrade", b"websocket"), (b"Sec-WebSocket-Key", b"x"), (b"Sec-WebSocket-Version", b"13")],
        "another language": [(b"Accept", b"*/;q=x"), (b"Accept-Encoding", clean[:40])],
        "forwarded": [(b"X-Forwarded-For", b"127.0.0.1"), (b"X-Forwarded-Host", b"evil.example")],
        "an expectation": [(b"Expect", b"100-continue")],
        "a line that goes on": [(b"X-Folded", b"a\r\n b")],
    }  # fmt: skip
    keys = [b"", b"tml-wrong", b"\xff\xfe", b"x" * 20_000, b"' OR 1=1 --", b"tml-\x00"]
    kind = rng.choice([*kinds, "another key", "no key", "no host"])
    if kind in kinds:
        return Broken(replace(request, headers=(*request.headers, *kinds[kind])), kind)
    if kind == "another key":
        return Broken(replace(request, headers=request.with_header(b"X-API-Key", rng.choice(keys))), kind)
    name = b"x-api-key" if kind == "no key" else b"host"
    return Broken(
        replace(request, headers=tuple(header for header in request.headers if header[0].lower() != name)), kind
    )


def broken_target(request: Request, rng: random.Random) -> Broken:
    """Another path, an invalid id in it, or an invalid query."""
    path, mark, query = request.target.partition("?")
    parts = path.split("/")
    at = rng.randrange(1, len(parts))
    nasty = rng.choice([text for text in TEXTS if "\ud800" not in text])[:20_000]
    strange = [quote(nasty, safe=""), "%ED%A0%80", "%FF%FE", "..", "%2e%2e", "%00", "x" * 30_000, "%", "%zz"]
    inside = "/".join([*parts[:at], rng.choice(strange), *parts[at + 1 :]]) + mark + query
    name = rng.choice(["limit", "offset", "access_scope", "project_id", "after", "search", "order", "kind", "model_id"])
    values = ["-1", "x", "9" * 30, "1e5", "", nasty, "NaN", "true", "1,2", "\x00", "'"]
    kinds: dict[str, str] = {
        "a strange part of the path": inside,
        "a slash too many": path + "/" + mark + query,
        "two slashes": "/" + request.target,
        "capitals": path.upper(),
        "a whole address": "http://evil.example" + request.target,
        "no path": rng.choice(["*", "?", "", "/", "/.", "/%2f"]),
        "a strange query": with_query(request.target, name, rng.choice(values)),
        "a query that is no query": request.target + "?" + rng.choice(["%ff", "&&&==&", "x" * 40_000, "a[b]=c", ";"]),
        "a fragment": request.target + "#x",
    }
    kind = rng.choice(list(kinds))
    return Broken(replace(request, target=kinds[kind].replace(" ", "%20").replace("\n", "%0a")), kind)


def broken_method(request: Request, rng: random.Random) -> Broken:
    method = rng.choice(["BREW", "HEAD", "OPTIONS", "PATCH", "PUT", "TRACE", "CONNECT", request.method.lower(), "GET"])
    return Broken(replace(request, method=method), f"the method {method}")


def broken_protobuf(request: Request, rng: random.Random) -> Broken:
    """Change a message's bytes, or add unknown fields."""
    body = bytearray(request.body)
    kinds = ["flipped bits", "cut", "unknown fields", "a length without end", "JSON", "a group", "many fields"]
    kind = rng.choice(kinds)
    if kind == "flipped bits":
        for _ in range(rng.choice([1, 3, 20])):
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del body[rng.randrange(len(body)) :]
    elif kind == "unknown fields":
        body += b"\xfa\xff\x07" + bytes([len(b"strange")]) + b"strange" + b"\x80\x80\x08\x01"
    elif kind == "a length without end":
        body += b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"
    elif kind == "JSON":
        body = bytearray(b'{"model_id":"x"}')
    elif kind == "a group":
        body += b"\x0b" * 10_000
    else:
        body += b"\x1a\x00" * 200_000
    return Broken(replace(request, body=bytes(body)), f"protobuf: {kind}")


def broken_form(request: Request, rng: random.Random) -> Broken:
    """A multipart form with invalid parts."""
    body = request.body
    other = rng.choice(TEXTS).encode("utf-8", "replace")[:70_000].replace(b'"', b"")
    part = b'--attack-boundary\r\nContent-Disposition: form-data; name="x"\r\n\r\ny\r\n'
    kinds: dict[str, bytes] = {
        "another boundary": body.replace(b"attack-boundary", b"other"),
        "no end": body[:-4],
        "cut": body[: rng.randrange(len(body))],
        "a strange value": body.replace(b"\r\n\r\nbatch\r\n", b"\r\n\r\n" + other + b"\r\n").replace(
            b"uploaded", other
        ),
        "a strange file name": body.replace(b'filename="', b'filename="' + other[:4000]),
        "no name": body.replace(b"name=", b"x="),
        "many parts": part * 5000 + body,
        "a part twice": body.replace(b"--attack-boundary--", body),
        "empty parts": b"--attack-boundary\r\n" * 1000 + body,
        "a long head": body.replace(b"form-data;", b"form-data; x=" + b"y" * 50_000 + b";", 1),
    }
    kind = rng.choice(list(kinds))
    return Broken(replace(request, body=kinds[kind]), f"form: {kind}")


def broken(request: Request, rng: random.Random) -> Broken:
    """Choose a mutation that fits the request, most likely one of the body."""
    content_type = request.header(b"Content-Type")
    ways: list[tuple[int, Callable[[], Broken]]] = [
        (2, lambda: broken_headers(request, rng)),
        (3, lambda: broken_target(request, rng)),
        (1, lambda: broken_method(request, rng)),
    ]
    if content_type:
        ways += [
            (2, lambda: broken_body(request, rng)),
            (2, lambda: broken_encoding(request, rng)),
            (1, lambda: broken_framing(request, rng)),
        ]
    if content_type == JSON:
        ways.append((14, lambda: change_field(copy.copy(request), rng, rng.choice(FIELD_KINDS))))
    elif content_type == PROTO:
        ways.append((10, lambda: broken_protobuf(request, rng)))
    elif content_type:
        ways.append((10, lambda: broken_form(request, rng)))
    return rng.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()
