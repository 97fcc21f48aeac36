"""Weight versions in an external engine: which it has, under which name, and which it lets go.

A version is written once, into a directory of its own, and never changed; each time that the engine loads it, it gets a
name that was never used before, so that nothing that is cached under a name can be of other weights. At most `most` are
loaded; the least recently used leaves first, and one that answers are drawn from stays. A version that is retired is
unloaded, and its files are deleted, once nobody uses it. Lives on one event loop; knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from tinsmith.errors import TinsmithError

NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
IN_A_LAYER = re.compile(r"\.\d+\.")

log = structlog.get_logger()

Write = Callable[[Path], None]


class Version:
    """What is to be sampled from: `write` puts its files into a directory, from any thread."""

    def __init__(self, version_id: str, write: Write) -> None:
        self.version_id = version_id
        self._write: Write | None = write
        self._directory: Path | None = None
        self.name = ""  # in the engine, while it is loaded there
        self.era = -1  # of the engine that has it
        self.users = 0  # for them it stays loaded
        self.claims = 0  # for these its files stay
        self.retired = False
        self.adapts_unembedding = False
        self.loading = asyncio.Lock()

    def files(self, directory: Path) -> Path:
        """Its directory, written if it is not there yet."""
        if self._write is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._write(directory)
            self._directory, self._write = directory, None
            self.adapts_unembedding = _adapts_unembedding(directory)
        assert self._directory is not None
        return self._directory

    def discard(self) -> None:
        self._write = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _adapts_unembedding(directory: Path) -> bool:
    """Whether an adapter in PEFT's format has weights outside of the numbered layers."""
    try:
        with (directory / "adapter_model.safetensors").open("rb") as file:
            names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError):
        return False
    return any(".lora_" in name and not IN_A_LAYER.search(name) for name in names)


class Adapters:
    """`load` and `unload` ask the engine, by name; `load` raises UserError if the engine refuses."""

    def __init__(
        self,
        directory: Path,
        most: int,
        load: Callable[[Version, Path], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._most = most
        self._load = load
        self._unload = unload
        self._loaded: dict[Version, None] = {}  # least recently used first
        self._freed = asyncio.Condition()
        self._numbers = itertools.count()
        self._process = secrets.token_hex(4)  # engines may be shared

    @property
    def names(self) -> list[str]:
        return [version.name for version in self._loaded]

    @contextlib.asynccontextmanager
    async def held(self, version: Version, era: int) -> AsyncIterator[str]:
        """The version's name in the engine of this era, which keeps it until the end of the block."""
        version.users += 1
        try:
            async with version.loading:
                if version in self._loaded and version.era != era:
                    await self._drop(version)  # an engine that only seemed to be gone would keep it for ever
                if version not in self._loaded:
                    await self._bring(version, era)
            self._loaded[version] = self._loaded.pop(version)
            yield version.name
        finally:
            version.users -= 1
            await self._let_go(version)

    async def retire(self, version: Version) -> None:
        """Nobody will ask for it any more but those that have a claim on it."""
        version.retired = True
        await self._let_go(version)

    async def release(self, version: Version) -> None:
        """One claim less."""
        version.claims -= 1
        await self._let_go(version)

    async def forget(self, version: Version) -> None:
        """The engine says that it does not have it."""
        self._loaded.pop(version, None)
        version.era = -1

    async def clear(self) -> None:
        """Have the engine forget all: what it would keep over a sleep is not relied on."""
        for version in list(self._loaded):
            await self._drop(version)

    async def _bring(self, version: Version, era: int) -> None:
        await self._make_room(era)
        number = next(self._numbers)
        # First the place, then the files: others count it meanwhile.
        version.era, version.name = era, f"{NOT_A_NAME.sub('-', version.version_id)[-80:]}-{self._process}-{number}"
        self._loaded[version] = None
        try:
            directory = await asyncio.to_thread(version.files, self._directory / version.name)
            await self._load(version, directory)
        except BaseException:
            self._loaded.pop(version, None)
            version.era = -1
            raise

    async def _make_room(self, era: int) -> None:
        while len(self._loaded) >= self._most:
            stale = next((one for one in self._loaded if one.era != era), None)
            oldest = stale or next((one for one in self._loaded if not one.users), None)
            if oldest is None:
                async with self._freed:
                    await self._freed.wait()
            else:
                await self._drop(oldest)

    async def _drop(self, version: Version) -> None:
        name = version.name
        self._loaded.pop(version, None)
        version.era = -1
        try:
            await self._unload(name)
        except TinsmithError as error:  # it may have died since; a name is not used twice
            log.warning("an adapter could not be unloaded", adapter=name, error=str(error))

    async def _let_go(self, version: Version) -> None:
        if not version.users and not version.claims and version.retired:
            if version in self._loaded:
                await self._drop(version)
            await asyncio.to_thread(version.discard)
        async with self._freed:
            self._freed.notify_all()
