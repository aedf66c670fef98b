# SPDX-License-Identifier: Apache-2.0
"""Every way to move tensors between ranks against the same pictures, with ranks that are threads."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.distributed.gloo import Gloo, file_store
from quire.distributed.group import ALONE, Group, HostGroups, ranks_per_host
from quire.distributed.shared_memory import MAX_RANKS, SharedMemory, share_memory
from quire.errors import EngineError, RankLostError, StartupError
from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.reference_collectives import tree_sum
from tests.fixtures.folded import folded
from tests.fixtures.thread_ranks import InProcess
from tests.fixtures.threads import shuffle

SIZES = [2, 3, 4]
needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())
DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def on_all(groups: Sequence[Group], work: Callable[[Group], Any]) -> list[Any]:
    """Run the work of all ranks concurrently and return each rank's result."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def in_process(size: int, directory: Path) -> Sequence[Group]:
    return InProcess.group(size, timeout_s=300)


def gloo(size: int, directory: Path) -> Sequence[Group]:
    def join(rank: int) -> Group:
        return Gloo(rank, size, file_store(directory / "meet", size))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


def shared_memory(size: int, directory: Path) -> Sequence[Group]:
    """With so small pieces that most tensors take several."""
    return on_all(InProcess.group(size, timeout_s=300), lambda group: share_memory(group, piece_bytes=64))


def hosts(size: int, directory: Path) -> Sequence[Group]:
    """Four are those of two hosts."""
    worlds = in_process(size, directory)
    if size != 4:
        return worlds
    near, far = ([InProcess.group(2, timeout_s=300) for _ in range(2)] for _ in range(2))

    def join(world: Group) -> Group:
        host, place = divmod(world.rank, 2)
        return HostGroups(world, share_memory(near[host][place], piece_bytes=64), far[place][host])

    return on_all(worlds, join)


@pytest.fixture(params=[in_process, gloo, shared_memory, hosts], ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Sequence[Group]]]:
    made: list[Group] = []

    def groups(size: int) -> Sequence[Group]:
        made.extend(request.param(size, tmp_path))
        return made

    yield groups
    for group in made:
        group.close()


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, generator=random)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_collectives(size: int, make: Callable[[int], Sequence[Group]]) -> None:
    groups = make(size)
    for dtype in DTYPES:
        for shape in [(1,), (3, 5), (0, 4), (2, 1, 7)]:
            parts = [numbers(rank, *shape, dtype=dtype) for rank in range(size)]
            for gathered in on_all(groups, lambda group, parts=parts: group.all_gather(parts[group.rank])):
                assert all(map(torch.equal, gathered, parts))
            check_ops(groups, parts)
    check_ops(groups, [numbers(rank, 4, 6).t() for rank in range(size)])  # strided


def check_ops(groups: Sequence[Group], parts: Sequence[Tensor]) -> None:
    """Bit for bit."""

    def work(group: Group) -> list[Tensor]:
        own = parts[group.rank]
        return [ops.all_reduce(own, group), *(ops.all_gather(own, group, dim) for dim in range(own.dim()))]

    want = [tree_sum(parts), *(torch.cat(list(parts), dim) for dim in range(parts[0].dim()))]
    for got in on_all(groups, work):
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_uneven_counts_reach_their_ranks(size: int, make: Callable[[int], Sequence[Group]]) -> None:
    groups = make(size)
    for seed, dtype in enumerate(DTYPES):
        random = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, 4, (size, size), generator=random)
        counts[seed % size] = 0
        rows = [numbers(rank, int(counts[rank].sum()), 3, dtype=dtype) for rank in range(size)]
        parts = [row.split(count.tolist()) for row, count in zip(rows, counts, strict=True)]

        def exchange(group: Group, rows: Any = rows, counts: Any = counts) -> Any:
            return ops.all_to_all(rows[group.rank], counts[group.rank].tolist(), group)

        for rank, (came, numbers_of) in enumerate(on_all(groups, exchange)):
            assert numbers_of == counts[:, rank].tolist()
            assert torch.equal(came, torch.cat([part[rank] for part in parts]))


def test_sent_tensor_has_its_values_at_the_send(make: Callable[[int], Sequence[Group]]) -> None:
    first, second = make(2)

    def talk(group: Group) -> list[float]:
        x = torch.zeros(3)
        for step in range(4):
            if group is first:
                ops.send(x + step, group, to=1)
                ops.recv(x, group, source=1)
            else:
                ops.recv(x, group, source=0)
                x *= 2
                ops.send(x, group, to=0)
                x.zero_()
        return x.tolist()

    assert on_all([first, second], talk)[0] == [22.0] * 3


def test_send_to_own_or_missing_rank_is_refused(make: Callable[[int], Sequence[Group]]) -> None:
    for group in (ALONE, make(2)[0]):
        for peer in (0, -1, 2):
            with pytest.raises(EngineError, match=f"rank 0 of {group.size} has no peer {peer}"):
                group.send(torch.zeros(1), peer)
            with pytest.raises(EngineError, match=f"rank 0 of {group.size} has no peer {peer}"):
                group.recv(torch.zeros(1), peer)


def test_the_tree_over_all_holds_the_tree_over_each_half() -> None:
    parts = [numbers(seed, 50) for seed in range(8)]
    whole = tree_sum(parts)
    for ranks in (2, 4, 8):
        share = 8 // ranks
        own = [tree_sum(parts[first : first + share]) for first in range(0, 8, share)]
        assert torch.equal(tree_sum(own), whole)


def test_all_ranks_learn_which_rank_left_and_why() -> None:
    groups = InProcess.group(3, timeout_s=300)

    def work(group: Group) -> str:
        if group.rank == 2:
            group.close("out of memory")
            return ""
        with pytest.raises(RankLostError) as lost:
            group.all_gather(torch.zeros(1))
        group.close(str(lost.value))
        return str(lost.value)

    first, second, _ = on_all(groups, work)
    assert "rank 2 is lost; it says: out of memory" in first
    assert "rank 2 is lost; it says: out of memory" in second


def common(size: int, **options: Any) -> list[SharedMemory]:
    """Ranks that are threads, with memory in common."""
    groups = on_all(InProcess.group(size, timeout_s=300), lambda group: share_memory(group, **options))
    assert all(isinstance(group, SharedMemory) for group in groups), "this machine has memfd"
    return groups


@needs_kernels
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_in_shared_memory_of_all_sizes(size: int) -> None:
    groups = common(size)
    for count in (1, 7, 1024, 100_003, 1 << 20) if size == 2 else (7, 100_003):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_ops(groups, [numbers(rank, count, dtype=dtype) for rank in range(size)])


@needs_kernels
def test_threads_share_the_work_of_collectives(restore_threads: None) -> None:
    set_num_threads(3)
    shuffle(5)
    check_ops(common(2), [numbers(rank, 3, 100_003) for rank in range(2)])


@needs_kernels
def test_all_ranks_learn_which_left_shared_memory_and_why() -> None:
    groups = common(3)

    def work(group: Group) -> str:
        if group.rank == 2:
            group.close("out of memory: " + "é" * 100)
            return ""
        with pytest.raises(RankLostError) as lost:
            ops.all_reduce(torch.zeros(3), group)
        group.close()
        return str(lost.value)

    for said in on_all(groups, work)[:2]:
        assert said.startswith("rank 2 is lost; it says: out of memory: ééé")


@needs_kernels
def test_a_rank_that_runs_and_does_not_come_is_named() -> None:
    first, _ = common(2, answer_s=0.2)
    with pytest.raises(
        RankLostError, match=r"rank 1 is lost; it says: process \d+ did not answer within 0.2 s"
    ):
        ops.all_gather(torch.zeros(3), first)


def test_shared_memory_is_unnamed_and_freed_with_its_processes() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("quire-ranks")

    gc.collect()
    before = maps()
    groups = common(2)
    assert maps() == before + 2
    assert not list(Path("/dev/shm").glob("*quire-ranks*"))
    del groups
    gc.collect()
    assert maps() == before


def test_ranks_that_cannot_all_have_the_memory_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in ([True, False], [False, True]):
        groups = InProcess.group(2, timeout_s=300)
        assert on_all(groups, lambda group, able=able: share_memory(group, able=able[group.rank])) == groups
    many = InProcess.group(MAX_RANKS + 1, timeout_s=300)
    assert on_all(many, share_memory) == many
    monkeypatch.setattr(os, "memfd_create", lambda name: os.open(os.devnull, os.O_RDWR))  # of no size
    groups = InProcess.group(2, timeout_s=300)
    assert on_all(groups, share_memory) == groups


def test_a_rank_that_is_silent_is_named() -> None:
    first, _ = InProcess.group(2, timeout_s=0.05)
    with pytest.raises(RankLostError, match=r"rank 1 is lost; it says: no answer within 0.05 s"):
        first.all_gather(torch.zeros(1))


def test_a_process_that_is_silent_is_named(tmp_path: Path) -> None:
    def join(rank: int) -> Group:
        return Gloo(rank, 2, file_store(tmp_path / "meet", 2), answer_s=0.3)

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(join, range(2)))
    with pytest.raises(RankLostError, match="rank 1 is lost; it says: "):
        groups[0].all_gather(torch.zeros(1))
    for group in groups:
        group.close()


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match=r"rank 1 has waited 0.05 s for ranks 0, 2 of 3, which did not join"
    ):
        Gloo(1, 3, file_store(tmp_path / "meet", 3), join_s=0.05)


VICTIM = """
import sys, time
from pathlib import Path
from quire.distributed.gloo import Gloo, file_store
from quire.distributed.shared_memory import share_memory
group = Gloo(1, 3, file_store(Path(sys.argv[1]), 3), answer_s=600)
if sys.argv[2] == "shared_memory":
    group = share_memory(group)
print("joined", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "signal_", "said"),
    [
        ("gloo", signal.SIGKILL, ""),
        ("shared_memory", signal.SIGKILL, r"process \d+ has ended"),
        pytest.param("gloo", signal.SIGSTOP, "", marks=pytest.mark.more),
        pytest.param("shared_memory", signal.SIGSTOP, r"process \d+ is stopped", marks=pytest.mark.more),
    ],
    ids=["gloo, killed", "shared memory, killed", "gloo, stopped", "shared memory, stopped"],
)
def test_a_process_that_is_killed_or_stopped_is_named_by_all(
    kind: str, signal_: int, said: str, tmp_path: Path
) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path / "meet"), kind],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    joined, struck = threading.Barrier(3), threading.Event()

    def work(rank: int) -> str:
        group: Group = Gloo(rank, 3, file_store(tmp_path / "meet", 3), join_s=200, answer_s=600)
        if kind == "shared_memory":
            group = share_memory(group)
        joined.wait()
        struck.wait()
        for _ in range(2):  # what is lost stays lost
            with pytest.raises(RankLostError) as lost:
                ops.all_reduce(torch.zeros(1), group)
        group.close()
        return str(lost.value)

    with ThreadPoolExecutor(2) as threads:
        losses = [threads.submit(work, rank) for rank in (0, 2)]
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"joined\n"
        joined.wait()
        victim.send_signal(signal_)
        if signal_ == signal.SIGKILL:
            victim.wait()
        struck.set()
        assert [bool(re.match(f"rank 1 is lost; it says: {said}", loss.result())) for loss in losses] == [
            True
        ] * 2
    victim.kill()
    victim.wait()
    victim.stdout.close()


SURVIVOR = """
import sys
from pathlib import Path
import torch
from quire.distributed.gloo import Gloo, file_store
group = Gloo(int(sys.argv[1]), 2, file_store(Path(sys.argv[2]), 2))
for _ in range(50):
    group.all_gather(torch.zeros(1000))
"""


@pytest.mark.more
def test_a_program_may_end_with_a_group_that_is_open(tmp_path: Path) -> None:
    for meeting in range(4):  # a thread that wants the interpreter once it is gone aborts; not every time
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SURVIVOR, str(rank), str(tmp_path / f"meet{meeting}")],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        assert [rank.wait(100) for rank in ranks] == [0, 0]


@needs_kernels
@pytest.mark.parametrize("count", [1, 3, 4096, 4097, 9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_across_hosts_have_the_bits_of_one_tree(dtype: torch.dtype, count: int, tmp_path: Path) -> None:
    """Few elements, which each rank takes across, and many, of which each takes a part."""
    random = torch.Generator().manual_seed(count)
    shown = [torch.randn(count, generator=random).to(dtype) for _ in range(4)]
    for found in on_all(hosts(4, tmp_path), lambda group: ops.all_reduce(shown[group.rank], group)):
        assert torch.equal(found, tree_sum(shown))


@folded(
    ("ranks", "size"),
    [
        ("aabb", 2),
        ("aaaabbbb", 4),
        ("aaaa", None),
        ("ab", None),
        ("abab", None),
        ("aaabbb", None),
        ("aabbb", None),
    ],
)
def test_hosts_with_uneven_neighbors_share_no_memory(ranks: str, size: int | None) -> None:
    assert ranks_per_host(ranks) == size
