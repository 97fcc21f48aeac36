"""S3 and Google Cloud Storage on loopback, for tests of storage in a bucket.

S3 is moto's server. The client of `gs://` speaks Cloud Storage's XML API, which emulators of Cloud Storage lack beyond
reading (gcp-storage-emulator 2026.7.19, fake-gcs-server). By its documentation, that API is S3's with other headers, so
`CloudStorage` translates these and forwards the rest to moto. It refuses Amazon's headers.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import pytest

PATIENCE_S = 120.0
SIGNATURE = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
"""A header that moto accepts as a signature."""


@dataclass(frozen=True, slots=True)
class Bucket:
    name: str
    client: Any
    """boto3's client; Tinsmith itself uses another library."""
    scheme: str = "s3"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.name}"

    def keys(self, prefix: str = "") -> list[str]:
        listing = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return sorted(entry["Key"] for entry in listing.get("Contents", ()))

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)


@contextlib.contextmanager
def bucket() -> Iterator[Bucket]:
    """A fresh bucket; the environment points this process and its children to it until the end of the block."""
    import boto3
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_REGION", "us-east-1")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        new_bucket = Bucket(f"bucket-{uuid.uuid4().hex}", boto3.client("s3"))
        new_bucket.client.create_bucket(Bucket=new_bucket.name)
        try:
            yield new_bucket
        finally:
            new_bucket.client.close()
            server.stop()


class CloudStorage:
    """A WSGI application. `refusals` are answered in place of the next requests: a status with its XML, or None to
    answer nothing until `released` is set.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._s3 = DomainDispatcherApplication(create_backend_app)
        self.refusals: list[tuple[str, str] | None] = []
        self.released = threading.Event()
        self.lists = 0
        self._etags: dict[str, str] = {}  # by the generation of an object, which follows from its etag here

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        foreign = [name for name in environ if name.startswith("HTTP_X_AMZ_")]
        refusal = ("400 Bad Request", f"<Error>not headers of Cloud Storage: {foreign}</Error>") if foreign else None
        if self.refusals:
            refusal = self.refusals.pop(0)
            if refusal is None:
                self.released.wait(PATIENCE_S)
                refusal = ("503 Service Unavailable", "<Error/>")
        if refusal is not None:
            start(refusal[0], [("Content-Type", "application/xml")])
            return [refusal[1].encode()]
        self.lists += "list-type=2" in environ.get("QUERY_STRING", "")
        environ["HTTP_AUTHORIZATION"] = SIGNATURE  # in place of an OAuth token
        for name in ("RAW_URI", "REQUEST_URI"):
            environ[name] = unquote(environ[name])
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation == "0":  # only if there is no such object
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif generation is not None:
            environ["HTTP_IF_MATCH"] = self._etags.get(generation, "none")
        if source := environ.pop("HTTP_X_GOOG_COPY_SOURCE", None):
            environ["HTTP_X_AMZ_COPY_SOURCE"] = source

        def start_with_generation(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:  # noqa: ANN401
            etag = dict(headers).get("ETag")
            if etag is None:
                return start(status, headers, *rest)
            generation = str(zlib.crc32(etag.encode()) + 1)
            self._etags[generation] = etag
            return start(status, [*headers, ("x-goog-generation", generation)], *rest)

        return self._s3(environ, start_with_generation)


@contextlib.contextmanager
def cloud_bucket() -> Iterator[tuple[Bucket, CloudStorage]]:
    """A fresh bucket of Cloud Storage, and its server."""
    from werkzeug.serving import make_server

    with bucket() as s3_bucket, pytest.MonkeyPatch.context() as environment:
        cloud = CloudStorage()
        server = make_server("127.0.0.1", 0, cloud, threaded=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        environment.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{server.port}")
        try:
            yield replace(s3_bucket, scheme="gs"), cloud
        finally:
            cloud.released.set()
            server.shutdown()
            thread.join()
            server.server_close()
