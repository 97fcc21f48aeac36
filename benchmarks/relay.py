"""A TCP relay that makes a server on this machine seem distant: a round-trip time, and a bandwidth in each direction.

    python benchmarks/relay.py --to 8000 --round-trip-ms 40 --mbit 100      # prints its own port

The bandwidth is that of all connections together, as on one line. Bytes leave in order, after half of the round trip.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

CHUNK = 1 << 16


class Line:
    """One direction of the line."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s
        self._free_at = 0.0

    def schedule(self, size: int) -> float:
        """The moment on the loop's clock at which `size` bytes that are sent now have arrived."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        return self._free_at + self._delay_s

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=4096)

        async def receive() -> None:
            chunk = b"-"
            while chunk:
                chunk = await reader.read(CHUNK)
                await chunks.put((self.schedule(len(chunk)), chunk))

        receiving = asyncio.ensure_future(receive())
        try:
            while True:
                arrival, chunk = await chunks.get()
                await asyncio.sleep(arrival - asyncio.get_running_loop().time())
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            receiving.cancel()
            writer.close()


async def relay(target_port: int, round_trip_s: float, bytes_per_s: float) -> None:
    up, down = (Line(round_trip_s / 2, bytes_per_s) for _ in range(2))

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(round_trip_s)  # TCP's handshake
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(up.carry(reader, target_writer), down.carry(target_reader, writer))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def start_relay(target_port: int, round_trip_ms: float, mbit: float) -> Iterator[int]:
    """A relay in a process of its own until the end of the block: its port."""
    options = ["--to", str(target_port), "--round-trip-ms", str(round_trip_ms), "--mbit", str(mbit)]
    process = subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=int, required=True, help="the server's port")
    parser.add_argument("--round-trip-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=1000.0, help="of each direction")
    args = parser.parse_args()
    asyncio.run(relay(args.to, args.round_trip_ms / 1000, args.mbit * 125_000))


if __name__ == "__main__":
    main()
