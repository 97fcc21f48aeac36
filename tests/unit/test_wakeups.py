"""Wake-ups arrive or are lost without an error; waiters poll when woken."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.db.wakeups import MAX_DATAGRAM_BYTES, Mailbox, Waiters, engine_mailbox, socket_dir
from tinsmith.errors import SettingsError


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tn-") as directory:  # a socket's path must be short
        yield Path(directory)


def test_any_number_of_ids_arrives(sockets: Path) -> None:
    reader, sender = Mailbox(sockets, "server"), Mailbox(sockets, "engine")
    ids = {f"{'x' * 100}:{index}" for index in range(2000)}
    assert len("\n".join(ids)) > 2 * MAX_DATAGRAM_BYTES
    sender.wake("server", ids)
    assert reader.wait(1.0)
    assert reader.drain() == ids
    assert not reader.wait(0.0)
    reader.close()
    sender.close()


def test_a_bare_wake_up_wakes(sockets: Path) -> None:
    reader, sender = Mailbox(sockets, "engine"), Mailbox(sockets, "server")
    sender.wake("engine")
    assert reader.wait(1.0)
    assert reader.drain() == {""}
    reader.close()
    sender.close()


def test_a_missing_receiver_and_a_full_buffer_are_not_errors(sockets: Path) -> None:
    sender = Mailbox(sockets, "server")
    sender.wake("engine", ["a"])
    reader = Mailbox(sockets, "engine")
    started = time.monotonic()
    for _ in range(5000):
        sender.wake("engine", ["x" * 1000])
    assert time.monotonic() - started < 5, "a full buffer does not block the sender"
    assert reader.drain() == {"x" * 1000}
    reader.close()
    sender.close()


def test_a_full_buffer_leaves_no_gap_in_a_token_stream(sockets: Path) -> None:
    sender = Mailbox(sockets, "engine")
    readers = [Mailbox(sockets, name) for name in ("server.slow", "server.quick")]
    all_lines: list[str] = []
    arrived: list[set[str]] = [set(), set()]
    for step in range(3000):  # far more than a kernel holds for a reader
        lines = [f"+{step}:{index}{'x' * 50}" for index in range(3)]
        all_lines += lines
        sender.stream("server", lines)
        arrived[1] |= readers[1].drain()
    assert arrived[1] == {*all_lines}
    for index in range(100):
        arrived[0] |= readers[0].drain()
        sender.stream("server", [str(index)])
    assert arrived[0] >= {*all_lines} and "98" in arrived[0]
    for mailbox in (sender, *readers):
        mailbox.close()


def test_a_token_stream_without_a_reader_is_not_kept(sockets: Path) -> None:
    sender, reader = Mailbox(sockets, "engine"), Mailbox(sockets, "server.one")
    for _ in range(2000):
        sender.stream("server", ["x" * 1000])
    assert sender._unsent
    reader.close()
    sender.stream("server", ["y"])
    assert sender._unsent == {}
    late = Mailbox(sockets, "server.one")
    sender.stream("server", ["z"])
    assert late.drain() == {"z"}
    late.close()
    sender.close()


def test_a_reader_that_never_reads_costs_a_bounded_memory(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.db.wakeups.MAX_UNSENT", 3)
    sender, reader = Mailbox(sockets, "engine"), Mailbox(sockets, "server")
    for _ in range(2000):
        sender.stream("server", ["x" * 1000])
        assert sum(map(len, sender._unsent.values())) <= 3
    reader.close()
    sender.close()


def test_a_message_to_a_group_reaches_exactly_its_members(sockets: Path) -> None:
    sender = Mailbox(sockets, "server.x")
    members = [Mailbox(sockets, name) for name in ("engine-a", "engine-a.one", "engine-a.two")]
    outsiders = [Mailbox(sockets, name) for name in ("engine-ab", "engine-ab.one", "engine-b.one")]
    sender.wake("engine-a", ["all"])
    sender.wake("engine-a.two", ["two"])
    assert [member.drain() for member in members] == [{"all"}, {"all"}, {"all", "two"}]
    assert [other.drain() for other in outsiders] == [set()] * 3
    time.sleep(0.2)  # the directory listing is cached by now
    sender.wake("engine-a", ["again"])
    late = Mailbox(sockets, "engine-a.late")
    members.pop().close()
    sender.wake("engine-a", ["late"])
    assert late.drain() == {"late"} and members[1].drain() == {"again", "late"}
    for mailbox in (sender, late, *members, *outsiders):
        mailbox.close()


def test_a_successor_takes_the_name_and_keeps_it(sockets: Path) -> None:
    sender, first = Mailbox(sockets, "server"), Mailbox(sockets, "engine")
    second = Mailbox(sockets, "engine")
    first.close()
    sender.wake("engine", ["a"])
    assert second.drain() == {"a"}
    second.close()
    sender.close()


def test_datagrams_that_are_not_text_are_ignored(sockets: Path) -> None:
    reader = Mailbox(sockets, "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"\xff\xfe\n\x00", str(sockets / "server"))
    assert reader.wait(1.0)
    assert len(reader.drain()) == 2
    reader.close()


def test_sockets_lie_where_only_their_user_can_enter(sockets: Path) -> None:
    Mailbox(sockets / "tinsmith" / "key", "server").close()
    for directory in (sockets / "tinsmith", sockets / "tinsmith" / "key"):
        assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("level", ["tinsmith", "tinsmith/key"])
@pytest.mark.parametrize("how", ["another user's", "everybody's", "a link", "a file"])
def test_a_directory_that_others_made_before_is_refused(
    sockets: Path, level: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could replace the sockets in it."""
    (sockets / level).parent.mkdir(exist_ok=True)
    if how == "a link":
        (sockets / "elsewhere").mkdir()
        (sockets / level).symlink_to(sockets / "elsewhere")
    elif how == "a file":
        (sockets / level).touch()
    else:
        (sockets / level).mkdir()
        if how == "everybody's":
            (sockets / level).chmod(0o777)
        else:
            lstat = Path.lstat
            theirs = lambda path: os.stat_result((*lstat(path)[:4], os.getuid() + 1, *lstat(path)[5:]))  # noqa: E731
            monkeypatch.setattr(Path, "lstat", lambda path: theirs(path) if path == sockets / level else lstat(path))
    with pytest.raises(SettingsError, match="could be changed by other users"):
        Mailbox(sockets / "tinsmith" / "key", "server")
    assert not (sockets / "elsewhere" / "server").exists()


def test_a_wait_ends_without_a_wake_up(sockets: Path) -> None:
    mailbox = Mailbox(sockets, "engine")
    started = time.monotonic()
    assert not mailbox.wait(0.05)
    assert time.monotonic() - started >= 0.05
    mailbox.close()


@given(st.text(min_size=1), st.text(min_size=1))
def test_base_models_do_not_share_a_mailbox(first: str, second: str) -> None:
    assert (engine_mailbox(first) == engine_mailbox(second)) is (first == second)
    assert len(str(socket_dir(Path("/" + "deep/" * 200)) / engine_mailbox(first))) < 100


def test_a_waiter_is_woken_by_its_own_id_only() -> None:
    async def run() -> None:
        waiters = Waiters()
        with waiters.watch("a") as watcher, waiters.watch("a") as twin, waiters.watch("b") as other:
            waiters.settled(["a", "unknown"])
            assert watcher.is_set() and twin.is_set() and not other.is_set()
            watcher.clear()
            waiters.wake_all()
            assert watcher.is_set() and other.is_set()
        assert len(waiters) == 0

    asyncio.run(run())


def test_closing_wakes_all_waiters() -> None:
    async def run() -> bool:
        waiters = Waiters()
        with waiters.watch("a") as woken:
            asyncio.get_running_loop().call_soon(waiters.close)
            await asyncio.wait_for(woken.wait(), 5)
        return waiters.closed

    assert asyncio.run(run())
