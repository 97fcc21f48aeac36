"""Weight versions loaded in an external engine: their names, their files, and which one is evicted.

Each version is written once, into its own directory, and never changed. Each load gives it a name that was never used
before, so that no cache of the engine can mix weights. At most `max_adapters` versions are loaded; the least recently
used one without running requests is evicted, and its slot is free when the engine has answered. A load runs to its end
when its request is cancelled, because the engine would finish it, too. A retired version is unloaded and its files are
deleted when no request uses it.
This module runs on one event loop and does not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog
from safetensors import SafetensorError

from tinsmith.errors import TinsmithError, UserError
from tinsmith.wire.adapter_files import WEIGHTS_FILE, read_header

UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
LAYER_INDEX = re.compile(r"\.\d+\.")

log = structlog.get_logger()

WriteFiles = Callable[[Path], None]


class Version:
    """A weight version. `write` puts its files into a directory and may run on any thread."""

    def __init__(self, version_id: str, write: WriteFiles) -> None:
        self.version_id = version_id
        self._write: WriteFiles | None = write
        self._directory: Path | None = None
        self.name = ""  # its name in the engine while it is loaded
        self.era = -1  # the era of the engine that loaded it
        self.users = 0  # running requests, which keep it loaded
        self.claims = 0  # jobs, which keep its files
        self.retired = False
        self.adapts_unembedding = False
        self.loading = asyncio.Lock()
        self.load: asyncio.Task[None] | None = None  # ends when the engine has it

    @property
    def is_loading(self) -> bool:
        return self.load is not None and not self.load.done()

    def ensure_files(self, directory: Path) -> Path:
        """The directory of its files; the first call writes them into `directory`."""
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
        names = read_header(directory / WEIGHTS_FILE)
    except UserError:
        return False
    return any(".lora_" in name and not LAYER_INDEX.search(name) for name in names)


class LoadedAdapters:
    """The versions that an engine has loaded. `load` raises UserError if the engine refuses; `unload` takes a name.
    Files go to `memory`, a directory in memory, if one is given and has space, else to `directory`.
    """

    def __init__(
        self,
        directory: Path,
        max_adapters: int,
        load: Callable[[Version, Path], Awaitable[None]],
        unload: Callable[[str], Awaitable[None]],
        memory: Path | None,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._max_adapters = max_adapters
        self._load = load
        self._unload = unload
        self._loaded: dict[Version, None] = {}  # least recently used first
        self._num_unloading = 0  # evicted versions that the engine may still have
        self._slot_freed = asyncio.Event()
        self._next_slot = asyncio.Lock()  # held by the load that gets the next free slot
        self._serials = itertools.count()
        self._process = secrets.token_hex(4)  # several processes may share an engine

    @contextlib.asynccontextmanager
    async def acquire(self, version: Version, era: int) -> AsyncIterator[str]:
        """Load the version into the engine of this era and yield its name; it stays loaded during the block."""
        version.users += 1
        try:
            async with version.loading:
                if version.load is not None and version.era != era:
                    await asyncio.wait([version.load])
                if version in self._loaded and version.era != era:
                    await self._evict(version)  # in case the engine is the same process
                if version not in self._loaded:
                    await self._take_slot(version, era)
                    version.load = asyncio.create_task(self._load_new(version))
                assert version.load is not None
                await asyncio.shield(version.load)
            if version in self._loaded:
                self._loaded[version] = self._loaded.pop(version)
            yield version.name
        finally:
            version.users -= 1
            await self._collect(version)

    async def retire(self, version: Version) -> None:
        """Mark a version as replaced: only jobs that already have a claim on it will use it."""
        version.retired = True
        await self._collect(version)

    async def release(self, version: Version) -> None:
        """Give up one claim."""
        version.claims -= 1
        await self._collect(version)

    async def forget(self, version: Version) -> None:
        """Note that the engine does not have this version."""
        self._loaded.pop(version, None)
        version.era = -1

    async def clear(self) -> None:
        """Unload all versions, because engines differ in what they keep over a sleep."""
        while loads := self._running_loads():
            await asyncio.wait(loads)
        for version in list(self._loaded):
            await self._evict(version)

    def close(self) -> None:
        for load in self._running_loads():
            load.cancel()

    def _running_loads(self) -> list[asyncio.Task[None]]:
        return [version.load for version in self._loaded if version.load is not None and version.is_loading]

    async def _take_slot(self, version: Version, era: int) -> None:
        async with self._next_slot:
            await self._make_room(era)
            readable = UNSAFE_CHARACTERS.sub("-", version.version_id)[-80:]
            version.era, version.name = era, f"{readable}-{self._process}-{next(self._serials)}"
            self._loaded[version] = None

    async def _load_new(self, version: Version) -> None:
        version.users += 1
        try:
            directory = await asyncio.to_thread(self._write_files, version)
            await self._load(version, directory)
        except BaseException:
            self._loaded.pop(version, None)
            version.era = -1
            raise
        finally:
            version.users -= 1
            await self._collect(version)

    def _write_files(self, version: Version) -> Path:
        if self._memory is not None:
            directory = self._memory / version.name
            try:
                return version.ensure_files(directory)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(directory, ignore_errors=True)
                log.warning("no space for an adapter in memory; its files go to the disk", error=str(error))
        return version.ensure_files(self._directory / version.name)

    async def _make_room(self, era: int) -> None:
        while len(self._loaded) + self._num_unloading >= self._max_adapters:
            stale = next((version for version in self._loaded if version.era != era and not version.is_loading), None)
            oldest = stale or next((version for version in self._loaded if not version.users), None)
            if oldest is None or self._num_unloading:
                self._slot_freed.clear()
                await self._slot_freed.wait()
            else:
                await self._evict(oldest)

    async def _evict(self, version: Version) -> None:
        name = version.name
        self._loaded.pop(version, None)
        version.era = -1
        self._num_unloading += 1
        try:
            await self._unload(name)
        except TinsmithError as error:  # the engine may have died; the name is not used again
            log.warning("an adapter could not be unloaded", adapter=name, error=str(error))
        finally:
            self._num_unloading -= 1
            self._slot_freed.set()

    async def _collect(self, version: Version) -> None:
        self._slot_freed.set()
        if not version.users and not version.claims and version.retired:
            if version in self._loaded:
                await self._evict(version)
            await asyncio.to_thread(version.discard)
