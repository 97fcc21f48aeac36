"""A read-only mirror of the Hugging Face hub for clients without internet: `HF_ENDPOINT=http://SERVER/hub`.

It serves the requests with which `huggingface_hub` reads a model: metadata, file list, and files whole or by `Range`.
The API key is the bearer token; a server without keys needs none.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from starlette.responses import Response

from tinsmith.api.access import Access
from tinsmith.api.declaration import ThreadPool, operation
from tinsmith.api.openapi import FILE_TYPE, LIST, TEXT, TEXTS, fields
from tinsmith.api.request import HUB, Call, JsonObject
from tinsmith.api.routes.downloads import StoredFile, file_response
from tinsmith.errors import ForbiddenError, NotFoundError
from tinsmith.exchange.hub import (
    HubFile,
    MissingEntryError,
    MissingError,
    Repository,
    base_repository,
    checkpoint_of,
    checkpoint_repository,
)
from tinsmith.wire.fields import Query, show

MODELS = "/api/models/{repo:path}"
REPOSITORY = fields({"id": TEXT, "sha": TEXT, "lastModified": TEXT, "siblings": LIST, "tags": TEXTS})


_hub = partial(operation, errors=(403, 404), prefixes=(HUB,))


@_hub("GET", "/api/whoami-v2", "Identify the token", answer=fields({"name": TEXT}), access=Access.NOTHING)
def whoami(call: Call) -> JsonObject:
    return {
        "type": "user",
        "id": call.tenant_id,
        "name": call.tenant_id,
        "fullname": call.tenant_id,
        "orgs": [],
        "auth": {"type": "access_token", "accessToken": {"displayName": "tinsmith", "role": "read"}},
    }


class TreeQuery(Query):
    recursive: bool = False


class ModelQuery(Query):
    blobs: bool = False


@_hub("GET", MODELS + "/tree/{revision}", "List the files of a repository", answer=LIST, query=TreeQuery)
@_hub(
    "GET", MODELS + "/tree/{revision}/{directory:path}", "List the files of a directory", answer=LIST, query=TreeQuery
)
def tree(call: Call, query: TreeQuery) -> list[JsonObject]:
    """Return the files of a repository, or of one of its directories."""
    repository = _repository(call)
    repository.check_revision(call.path["revision"])
    directory = call.path.get("directory", "").strip("/")
    files = {name: file for name, file in repository.files.items() if not directory or name.startswith(f"{directory}/")}
    if directory and not files:
        raise MissingEntryError(f"{repository.repo_id!r} has no directory {show(directory)}", repository.commit)
    prefix_length = len(directory) + 1 if directory else 0
    entries = [
        _file_entry(name, file) for name, file in files.items() if query.recursive or "/" not in name[prefix_length:]
    ]
    if query.recursive:
        return entries
    directories = {
        name[:prefix_length] + name[prefix_length:].partition("/")[0] for name in files if "/" in name[prefix_length:]
    }
    return [
        {"type": "directory", "path": name, "size": 0, "oid": repository.commit} for name in sorted(directories)
    ] + entries


# These follow the longer paths, since a repository's name may contain slashes.
@_hub("GET", MODELS + "/revision/{revision}", "Read a repository's metadata", answer=REPOSITORY, query=ModelQuery)
@_hub("GET", MODELS, "Read a repository's metadata", answer=REPOSITORY, query=ModelQuery)
def model(call: Call, query: ModelQuery) -> JsonObject:
    """Return a repository's metadata and, with the query `blobs`, the sizes and digests of its files."""
    repository = _repository(call)
    if "revision" in call.path:
        repository.check_revision(call.path["revision"])
    return {
        "_id": repository.commit[:24],
        "id": repository.repo_id,
        "modelId": repository.repo_id,
        "author": repository.repo_id.rpartition("/")[0],
        "sha": repository.commit,
        "lastModified": datetime.fromtimestamp(repository.modified_at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [repository.library],
        "library_name": repository.library,
        "siblings": [
            {"rfilename": name, **({"size": file.size_bytes, "blobId": file.etag[:40]} if query.blobs else {})}
            for name, file in repository.files.items()
        ],
    }


def _file_entry(name: str, file: HubFile) -> JsonObject:
    entry: JsonObject = {"type": "file", "path": name, "size": file.size_bytes, "oid": file.etag[:40]}
    if file.is_full_hash:
        entry["lfs"] = {"oid": file.etag, "size": file.size_bytes, "pointerSize": 0}
    return entry


@_hub(
    "GET",
    "/{repo:path}/resolve/{revision}/{file:path}",
    "Download a file, whole or by range",
    answer=FILE_TYPE,
    threads=ThreadPool.TRANSFERS,
)
def resolve(call: Call) -> Response:
    """Send a file, whole or by range."""
    repository, name = _repository(call), call.path["file"]
    repository.check_revision(call.path["revision"])
    if name in repository.hidden:
        raise ForbiddenError(
            f"{show(name)} of {repository.repo_id!r} is not available: this server does not serve the weights of "
            "base models; its operator can allow it with the setting hub_base_weights"
        )
    file = repository.file(name)
    headers = {"etag": f'"{file.etag}"', "x-repo-commit": repository.commit}
    return file_response(call.request, StoredFile(file.path, file.size_bytes, file.open), FILE_TYPE, headers)


def _repository(call: Call) -> Repository:
    """Return a base model, or a checkpoint that the caller may read. Raises MissingError."""
    services, repo_id = call.services, call.path["repo"]
    for shape in services.bases:
        if shape.name == repo_id:
            return base_repository(shape, weights=services.settings.hub_base_weights)
    ref = checkpoint_of(repo_id)
    try:
        if ref is not None:
            checkpoint = services.checkpoints.get(call.tenant_id, ref)
            files, directory = services.checkpoints.files, checkpoint.directory or ""
            return checkpoint_repository(repo_id, files, directory, checkpoint.created_at)
    except NotFoundError:
        pass
    raise MissingError(
        f"there is no repository {show(repo_id)}: a base model has the name under which it is served, and the "
        "checkpoint tinker://SESSION:train:N/KIND/NAME is SESSION/N.KIND.NAME"
    )
