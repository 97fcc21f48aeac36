"""Uploads a model or an adapter to a Hugging Face hub (HF_ENDPOINT) as one commit, so that it is complete or absent.

Large files are sent first, one after another, and belong to no commit until the last step. A repository that was to be
private and is public is refused. Knows no server and stores no token.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from tinsmith.errors import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

Sent = Callable[[int, int], None]
"""Called with the number of files and of bytes that have been sent."""


class _CountedFile(io.BufferedReader):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, on_position: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path))
        self._on_position = on_position

    def read(self, size: int | None = -1, /) -> bytes:
        content = super().read(-1 if size is None else size)
        self._on_position(self.tell())
        return content


def upload(
    files: Mapping[str, Path], card: str, repository: str, *, private: bool, token: str, title: str, on_sent: Sent
) -> str:
    """Upload files by name, with `card` as README.md; returns the address of the repository. Raises UserError."""
    api = HfApi(token=token)
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise UserError(
                f"{repository} exists and is public, and this upload is private; choose another name, or public"
            )
        operations = [CommitOperationAdd("README.md", card.encode())]
        sent_bytes = 0
        for index, (name, path) in enumerate(files.items()):

            def count_file(position: int, index: int = index, before: int = sent_bytes) -> None:
                on_sent(index, before + position)

            with _CountedFile(path, lambda _position: None) as opened:
                operation = CommitOperationAdd(name, opened)
                _ = operation.upload_info.sha256  # reads the file, before its bytes count as sent
                opened._on_position = count_file
                api.preupload_lfs_files(repository, [operation], num_threads=1)
                if operation._upload_mode != "lfs":  # a small file, which the commit holds
                    operation.path_or_fileobj = path.read_bytes()
            operations.append(operation)
            sent_bytes += path.stat().st_size
            on_sent(index + 1, sent_bytes)
        api.create_commit(repository, operations, commit_message=title)
    except HfHubHTTPError as error:
        raise UserError(_explain(error, repository)) from error
    except OfflineModeIsEnabled:
        raise UserError("the server's HF_HUB_OFFLINE forbids uploads; unset it and restart the server") from None
    return str(address)


def write_card(base_model: str, form: str, tinker_path: str) -> str:
    """A README.md: the metadata that a hub reads, and how the model was made. A base of this server is not linked."""
    library = "peft" if form == "adapter" else "transformers"
    link = [f"base_model: {base_model}"] if HUB_ID.fullmatch(base_model) and base_model.count("/") == 1 else []
    header = "\n".join(["---", f"library_name: {library}", *link, "tags:", "- lora", "---"])
    noun = "A LoRA adapter for" if form == "adapter" else "A LoRA adapter merged into"
    return f"{header}\n\n{noun} `{base_model}`, trained with Tinsmith (`{tinker_path}`).\n"


def _explain(error: HfHubHTTPError, repository: str) -> str:
    status = None if error.response is None else error.response.status_code
    if status == 401:
        return "the hub does not accept the token; start again with one that is valid and may write"
    if status == 403:
        return f"the token may not write to {repository}; use one with write access to it"
    said = str(error).strip().replace("\n", " ")[:500]
    return f"the hub refused the upload to {repository}: {said}"
