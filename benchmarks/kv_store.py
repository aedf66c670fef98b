# SPDX-License-Identifier: Apache-2.0
"""Rates of the KV cache's disk store beside plain reads and writes of the same files.

    python -m benchmarks.kv_store [--directory /var/tmp] [--num-rows 1000] [--pieces 24] [--piece-bytes 8192]
    python -m benchmarks.kv_store --directory /dev/shm  # rows in shared memory, beside memcpy
    python -m benchmarks.kv_store --peers               # rows of a row server, with both sides on one core
    python -m benchmarks.kv_store engines restart|step|decode|apart  # whole engines: `benchmarks.kv_store_engines`

Rows are scattered in memory as those of an engine are: one piece for each cache tensor. `plain` moves the same pieces
at the same offsets of the same files, without checksums and index. Pairs alternate, and the best round of each counts,
since nothing but the code itself makes a round fast. `cold` drops the files from the page cache before each round.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import kv_store_engines
from benchmarks.served import QUIRE, free_port
from quire.kv_store.disk.opening import open_disk_store
from quire.kv_store.disk.segment import PAGE, SegmentLayout
from quire.kv_store.disk.store import DiskStore
from quire.kv_store.peer import PeerStore
from quire.kv_store.row_store import NAME_BYTES, Namespace, Row, RowStore, RowStoreError

CHAIN = 250  # rows of one call: a prompt of 4,000 tokens


class Bench:
    """A full store, and plain files of the same size beside it."""

    def __init__(self, directory: Path, num_rows: int, pieces: int, piece_bytes: int) -> None:
        self.directory = directory
        self.num_rows = num_rows
        self.row_bytes = pieces * piece_bytes
        self.namespace = Namespace({"bench": "kv_store"}, self.row_bytes)
        self.max_bytes = (num_rows + 64) * (self.row_bytes + PAGE) * 2
        step = CHAIN * piece_bytes  # a tensor holds the pieces of all rows

        def scattered() -> list[Row]:
            memory = memoryview(bytearray(os.urandom(CHAIN * self.row_bytes)))
            return [
                [memory[p * step + r * piece_bytes : p * step + (r + 1) * piece_bytes] for p in range(pieces)]
                for r in range(CHAIN)
            ]

        self.rows, self.sources = scattered(), scattered()
        self.chains = [
            [os.urandom(NAME_BYTES) for _ in range(min(CHAIN, num_rows - start))]
            for start in range(0, num_rows, CHAIN)
        ]
        self.plain = directory / "plain"
        self.stride = SegmentLayout("0" * 32, self.row_bytes).stride

    def open(self, key: bytes | None = None) -> DiskStore:
        return open_disk_store(self.directory / "store", self.namespace, self.max_bytes, key)

    def write(self, store: RowStore) -> None:
        for chain in self.chains:
            assert store.write(chain, self.rows[: len(chain)]) == len(chain)

    def clear(self, store: RowStore) -> None:
        """Free all slots, whose blocks on the disk stay: both sides write over blocks that are there."""
        for chain in self.chains:
            store.remove(chain)
        store.pop_removed()

    def read(self, store: RowStore) -> None:
        for chain in self.chains:
            assert all(store.read(chain, self.rows[: len(chain)]))

    def move_plain(self, move: Callable[[int, Sequence[memoryview], int], int]) -> None:
        fd = os.open(self.plain, os.O_RDWR | os.O_CREAT)
        for index in range(self.num_rows):
            assert move(fd, self.rows[index % CHAIN], index * self.stride) == self.row_bytes
        os.close(fd)

    def copy(self) -> None:
        """Copy the pieces of all rows within memory."""
        for start in range(0, self.num_rows, CHAIN):
            for source, target in zip(self.sources, self.rows[: self.num_rows - start], strict=False):
                for part, copy in zip(source, target, strict=True):
                    copy[:] = part

    def drop(self) -> None:
        """Drop all files from the page cache."""
        os.sync()
        for file in (self.plain, *self.directory.glob("store/*/*.rows")):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def rate(self, run: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
        """Return GiB/s of one round."""
        before()
        start = time.perf_counter()
        run()
        return self.num_rows * self.row_bytes / (time.perf_counter() - start) / 2**30

    def compare(
        self,
        what: str,
        ours: Callable[[], None],
        plain: Callable[[], None],
        *,
        before: Callable[[], None] = lambda: None,
        plain_name: str = "plain",
    ) -> None:
        rounds = [(self.rate(ours, before), self.rate(plain, before)) for _ in range(5)]
        best, best_plain = max(rate for rate, _ in rounds), max(rate for _, rate in rounds)
        print(
            f"{what:<16} {best:6.2f} GiB/s   {plain_name} {best_plain:6.2f} GiB/s   {best / best_plain:4.0%}"
        )


def main() -> None:
    if sys.argv[1:2] == ["engines"]:
        kv_store_engines.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=None, help="Directory on the disk to measure.")
    parser.add_argument("--num-rows", type=int, default=1000)
    parser.add_argument("--pieces", type=int, default=24)
    parser.add_argument("--piece-bytes", type=int, default=8192)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--peers", action="store_true", help="Measure row servers.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        bench = Bench(Path(directory), given.num_rows, given.pieces, given.piece_bytes)
        if given.peers:
            run_peers(bench)
        else:
            run(bench, os.urandom(32) if given.encrypted else None)


def run_peers(bench: Bench) -> None:
    """Rates of a row server in memory and its client, which share one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for address in (f"unix:{bench.directory}/rows", f"tcp://127.0.0.1:{free_port()}"):
        command = [*QUIRE, "kv-store", "serve", address, "--max-gb", "4"]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            store = connected(address, bench.namespace)
            for what, move in (("write", bench.write), ("read", bench.read)):
                rates = []
                for _ in range(5):
                    if move == bench.write:
                        bench.clear(store)
                    rates.append(bench.rate(partial(move, store)) * 2**30 / 1e9)
                print(f"{address.partition(':')[0]} {what}: {max(rates):.2f} GB/s on one core (best of 5)")
            store.close()
        finally:
            server.terminate()
            server.wait()


def connected(address: str, namespace: Namespace) -> PeerStore:
    """Return a client of a server that is starting."""
    deadline = time.monotonic() + 60
    while True:
        store = PeerStore(address, namespace)
        try:
            store.find([bytes(NAME_BYTES)])
        except RowStoreError:
            store.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return store


def run(bench: Bench, key: bytes | None) -> None:
    store = bench.open(key)
    bench.write(store)
    bench.move_plain(os.pwritev)
    bench.compare(
        "write",
        lambda: bench.write(store),
        lambda: bench.move_plain(os.pwritev),
        before=lambda: bench.clear(store),
    )
    bench.clear(store)
    bench.write(store)
    bench.compare("read, warm", lambda: bench.read(store), lambda: bench.move_plain(os.preadv))
    bench.compare("read, warm", lambda: bench.read(store), bench.copy, plain_name="memcpy")
    bench.compare(
        "read, cold", lambda: bench.read(store), lambda: bench.move_plain(os.preadv), before=bench.drop
    )
    names = bench.chains[0]
    start = time.perf_counter()
    for _ in range(1000):
        store.find(names)
    print(f"find of {len(names)} names: {(time.perf_counter() - start) * 1e3:.1f} µs")
    store.close()
    start = time.perf_counter()
    bench.open(key).close()
    print(f"opening with {bench.num_rows} rows: {(time.perf_counter() - start) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
