"""Every way to move tensors between ranks against the same pictures, with ranks that are threads."""

from __future__ import annotations

import os
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
from quire.distributed.group import ALONE, Group
from quire.distributed.in_process import InProcess
from quire.errors import EngineError, RankLostError, StartupError
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum

SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def on_all(groups: Sequence[Group], work: Callable[[Group], Any]) -> list[Any]:
    """What each rank's work gives, all at once."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def in_process(size: int, directory: Path) -> Sequence[Group]:
    return InProcess.group(size, timeout_s=20)


def gloo(size: int, directory: Path) -> Sequence[Group]:
    def join(rank: int) -> Group:
        return Gloo(rank, size, file_store(directory / "meet", size))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


@pytest.fixture(params=[in_process, gloo], ids=["in_process", "gloo"])
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
    parts = [numbers(rank, 4, 6).t() for rank in range(size)]  # strided
    for total in on_all(groups, lambda group: ops.all_reduce(parts[group.rank], group)):
        assert torch.equal(total, tree_sum(parts))
    for row in on_all(groups, lambda group: ops.all_gather(parts[group.rank], group)):
        assert torch.equal(row, torch.cat(parts, -1))


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_uneven_numbers_reach_whom_they_are_for(
    size: int, make: Callable[[int], Sequence[Group]]
) -> None:
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


def test_what_is_sent_is_what_it_was_then(make: Callable[[int], Sequence[Group]]) -> None:
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


def test_nobody_sends_to_himself_or_to_nobody(make: Callable[[int], Sequence[Group]]) -> None:
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


def test_all_ranks_hear_who_left_and_why() -> None:
    groups = InProcess.group(3, timeout_s=20)

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
        StartupError, match=r"rank 1 has waited 0.05 s for ranks 0, 2 of 3, which did not come"
    ):
        Gloo(1, 3, file_store(tmp_path / "meet", 3), join_s=0.05)


VICTIM = """
import sys, time
from pathlib import Path
from quire.distributed.gloo import Gloo, file_store
group = Gloo(1, 3, file_store(Path(sys.argv[1]), 3))
print("joined", flush=True)
time.sleep(600)
"""


def test_a_process_that_is_killed_is_named_by_all(tmp_path: Path) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path / "meet")],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    joined = threading.Event()

    def work(rank: int) -> str:
        group = Gloo(rank, 3, file_store(tmp_path / "meet", 3), join_s=200)
        joined.wait()
        with pytest.raises(RankLostError) as lost:
            group.all_gather(torch.zeros(1))
        group.close()
        return str(lost.value)

    with ThreadPoolExecutor(2) as threads:
        losses = [threads.submit(work, rank) for rank in (0, 2)]
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"joined\n"
        victim.kill()
        victim.wait()
        joined.set()
        assert [loss.result().startswith("rank 1 is lost; it says: ") for loss in losses] == [True, True]
    victim.stdout.close()
