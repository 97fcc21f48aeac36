"""Signed links to a checkpoint's files: their scope, expiry and forgery."""

from __future__ import annotations

import io
import tarfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import jwt
import pytest
from httpx import Response
from starlette.testclient import TestClient
from tinker.types import ExternalWeightsUrlsResponse

from support.http_harness import ALICE, BOB, FILES, Harness
from tinsmith.api.app import create_app
from tinsmith.api.links import LINK_S
from tinsmith.api.routes.downloads import stream_tar
from tinsmith.auth.signing import Signer

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def export(harness: Harness) -> str:
    return harness.save_checkpoint(harness.model(), "external_weights")


def address(path: str) -> str:
    run_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run_id}/checkpoints/{checkpoint_id}"


def urls(harness: Harness, path: str, key: str = ALICE, **headers: str) -> dict[str, str]:
    all_headers = {"X-API-Key": key, **{name.replace("_", "-"): value for name, value in headers.items()}}
    answer = harness.client.get(f"/api/v1/{address(path)}/external_weights_urls", headers=all_headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["urls"]


def fetch(harness: Harness, url: str, **headers: str) -> Response:
    """Fetch without a key."""
    parts = urlsplit(url)
    return harness.client.get(f"{parts.path}?{parts.query}", headers=headers)  # type: ignore[return-value]


def archive(harness: Harness, path: str, key: str = ALICE) -> Response:
    return harness.client.get(  # type: ignore[return-value]
        f"/api/v1/{address(path)}/archive", headers={"X-API-Key": key}, follow_redirects=False
    )


def test_every_file_has_a_link_that_needs_no_key(harness: Harness, export: str) -> None:
    answer = harness.get(f"{address(export)}/external_weights_urls")
    links = ExternalWeightsUrlsResponse.model_validate(answer.json())
    assert links.expires.tzinfo is not None
    assert abs(links.expires - datetime.now(UTC) - timedelta(seconds=LINK_S)) < timedelta(seconds=60)
    assert {name: fetch(harness, url).content for name, url in links.urls.items()} == FILES
    for url in links.urls.values():
        assert url.startswith("http://127.0.0.1/api/v1/downloads/")


def test_a_file_comes_in_ranges(harness: Harness, export: str) -> None:
    url = urls(harness, export)[WEIGHTS]
    full_answer = fetch(harness, url)
    assert full_answer.headers["content-length"] == str(len(FILES[WEIGHTS]))
    assert full_answer.headers["content-type"] == "application/octet-stream"
    part = fetch(harness, url, Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, FILES[WEIGHTS][10:20])
    assert fetch(harness, url, Range="bytes=99999-").status_code == 416


@pytest.mark.parametrize(
    "range_header", ["bytes=5-2", "bytes=-", "bytes=", "bytes", "rows=1-2", "bytes=1-2,9-3", "bytes=x-y"]
)
def test_a_range_that_means_nothing_is_ignored(harness: Harness, export: str, range_header: str) -> None:
    answer = fetch(harness, urls(harness, export)[WEIGHTS], Range=range_header)
    assert (answer.status_code, answer.content) == (200, FILES[WEIGHTS])


def test_only_exports_have_such_links(harness: Harness) -> None:
    path = harness.save_checkpoint(harness.model())
    answer = harness.get(f"{address(path)}/external_weights_urls")
    assert answer.status_code == 400
    assert "is not an export" in answer.json()["detail"]


def test_another_tenant_gets_links_to_what_is_published(harness: Harness, export: str) -> None:
    path = f"{address(export)}/external_weights_urls"
    assert harness.get(path, BOB).status_code == 404
    assert archive(harness, export, BOB).status_code == 404
    harness.send("POST", f"{address(export)}/publish")
    assert fetch(harness, urls(harness, export, BOB)[WEIGHTS]).content == FILES[WEIGHTS]


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url.replace(WEIGHTS, "adapter_config.json"),
        lambda url: url.replace(WEIGHTS, "manifest.json"),
        lambda url: url.replace(WEIGHTS, "..%2F..%2Ftest.db"),
        lambda url: url.replace("/files/" + WEIGHTS, "/archive"),
        lambda url: url.replace("token=", "token=%00"),
        lambda url: url[:-9] + ("A" if url[-9] != "A" else "B") + url[-8:],
        lambda url: url.rpartition(".")[0] + ".",
        lambda url: url.rpartition(".")[0],
        lambda url: url.partition("?")[0],
        lambda url: url.replace("token=", "token=%F0%9F%92%A9"),
    ],
)
def test_a_changed_link_is_worth_nothing(harness: Harness, export: str, change) -> None:
    url = urls(harness, export)[WEIGHTS]
    assert change(url) != url
    answer = fetch(harness, change(url))
    assert answer.status_code in (403, 404), answer.status_code
    assert FILES[WEIGHTS] != answer.content
    if answer.status_code == 403:
        assert "signature is wrong for this server" in answer.json()["detail"]


def test_another_servers_link_and_one_for_another_purpose_are_worth_nothing(harness: Harness, export: str) -> None:
    url = urls(harness, export)[WEIGHTS]
    address_, _, token = url.partition("?token=")
    claims = {"path": urlsplit(url).path, "exp": int(time.time()) + 60}
    for signer, purpose in ((Signer(b"x" * 32), "download"), (harness.services.signer, "trace")):
        forged = signer.sign(purpose, claims)
        assert forged != token
        assert fetch(harness, f"{address_}?token={forged}").status_code == 403
    unsigned = jwt.encode(claims, "", algorithm="none")
    assert fetch(harness, f"{address_}?token={unsigned}").status_code == 403
    right = harness.services.signer.sign("download", claims)
    assert fetch(harness, f"{address_}?token={right}").status_code == 200


def test_a_link_expires(harness: Harness, export: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = urls(harness, export)[WEIGHTS]
    later = time.time() + LINK_S + 1
    monkeypatch.setattr("tinsmith.api.links.time.time", lambda: later)
    answer = fetch(harness, url)
    assert answer.status_code == 410
    assert "has expired" in answer.json()["detail"]


@pytest.mark.parametrize("how", ["delete", "overwrite", "expire"])
def test_a_link_dies_with_its_checkpoint(harness: Harness, export: str, how: str) -> None:
    url = urls(harness, export)[WEIGHTS]
    if how == "delete":
        harness.send("DELETE", address(export))
    elif how == "overwrite":
        harness.save_checkpoint(export.split("/")[2], "external_weights", files={WEIGHTS: b"other"})
    else:
        ref = harness.services.checkpoints.page("alice", 1, 0)[0][0].ref
        harness.services.checkpoints.set_ttl("alice", ref, -1.0)
    answer = fetch(harness, url)
    assert answer.status_code == 410
    assert "deleted or overwritten, or has expired" in answer.json()["detail"]


def test_damaged_files_are_not_sent(harness: Harness, export: str) -> None:
    url = urls(harness, export)[WEIGHTS]
    (directory,) = harness.services.checkpoints.files.path("").iterdir()
    (directory / WEIGHTS).write_bytes(b"short")
    answer = fetch(harness, url)
    assert answer.status_code == 500
    assert "cut short" in answer.json()["detail"]
    assert harness.get(f"{address(export)}/external_weights_urls").status_code == 500


# One archive.


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_an_archive_holds_all_files_of_any_checkpoint(harness: Harness, kind: str) -> None:
    path = harness.save_checkpoint(harness.model(), kind)
    redirect = archive(harness, path)
    assert redirect.status_code == 302
    remaining = parsedate_to_datetime(redirect.headers["expires"]) - datetime.now(UTC)
    assert timedelta(seconds=LINK_S - 60) < remaining <= timedelta(seconds=LINK_S)
    answer = fetch(harness, redirect.headers["location"])
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-disposition"].endswith(f'_{kind}_one.tar"')
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        members = {member.name: tar.extractfile(member) for member in tar}
        assert {name: file.read() for name, file in members.items() if file} == FILES


def test_the_length_of_an_archive_is_known_before_it_is_made(harness: Harness) -> None:
    url = archive(
        harness, harness.save_checkpoint(harness.model(), files={"a": b"", "b": bytes(512), "c": bytes(513)})
    ).headers["location"]
    parts = urlsplit(url)
    head = harness.client.head(f"{parts.path}?{parts.query}")
    full_answer = fetch(harness, url)
    assert (head.headers["content-length"], head.content) == (str(len(full_answer.content)), b"")
    with tarfile.open(fileobj=io.BytesIO(full_answer.content)) as tar:
        assert [(member.name, member.size) for member in tar] == [("a", 0), ("b", 512), ("c", 513)]


def test_an_archive_that_has_begun_ends_whole(harness: Harness) -> None:
    path = harness.save_checkpoint(harness.model())
    files = harness.services.checkpoints.files
    (directory,) = files.path("").iterdir()
    chunks = stream_tar(files, directory.name, files.files(directory.name))
    first = next(chunks)
    harness.send("DELETE", address(path))
    assert not directory.exists()
    with tarfile.open(fileobj=io.BytesIO(first + b"".join(chunks))) as tar:
        assert tar.getnames() == sorted(FILES)


# The public address.


def test_a_link_has_the_address_that_the_client_used(harness: Harness, export: str) -> None:
    for host in ("tinsmith.example:8443", "10.0.0.1", "[::1]:8000"):
        assert urls(harness, export, Host=host)[WEIGHTS].startswith(f"http://{host}/api/v1/downloads/")


def test_forwarded_headers_count_only_if_they_are_trusted(harness: Harness, export: str) -> None:
    forwarded = {
        "X_Forwarded_Host": "evil.example, api.example",
        "X_Forwarded_Proto": "https",
        "X_Forwarded_Prefix": "/tinker/",
    }
    assert urls(harness, export, **forwarded)[WEIGHTS].startswith("http://127.0.0.1/api/v1/downloads/")
    trusting = with_settings(harness, trust_forwarded_headers=True)
    assert urls(trusting, export, **forwarded)[WEIGHTS].startswith("https://api.example/tinker/api/v1/downloads/")
    assert urls(trusting, export)[WEIGHTS].startswith("http://127.0.0.1/api/v1/downloads/")
    fixed = with_settings(harness, trust_forwarded_headers=True, public_url="https://fixed.example/a/b/")
    url = urls(fixed, export, **forwarded)[WEIGHTS]
    assert url.startswith("https://fixed.example/a/b/api/v1/downloads/")
    # The proxy strips its prefix, and the link works.
    assert fetch(fixed, url.replace("/a/b", "")).content == FILES[WEIGHTS]


@pytest.mark.parametrize("host", ["a b", 'x"y', "a/b", "user@host", "x:99999999", ""])
def test_a_host_that_is_no_address_is_refused(harness: Harness, export: str, host: str) -> None:
    answer = harness.client.get(
        f"/api/v1/{address(export)}/external_weights_urls", headers={"X-API-Key": ALICE, "Host": host}
    )
    assert answer.status_code == 400
    assert "set the server's public_url" in answer.json()["detail"]


def with_settings(harness: Harness, **changes: object) -> Harness:
    settings = harness.services.settings.model_copy(update=changes)
    services = replace(harness.services, settings=settings)
    app = create_app(services)
    return replace(harness, app=app, services=services, client=TestClient(app, base_url="http://127.0.0.1"))
