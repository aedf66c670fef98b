# SPDX-License-Identifier: Apache-2.0
"""Each rank of a host has cores of its own, of one NUMA node where that is possible, from its first instruction on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.startup import choose_number_of_nodes
from quire.executor.rank_placement import affinity, rank_processors
from quire.executor.ranks.rank_processes import RankProcesses
from tests.engine.test_replicas import config, made_host

PROGRAM = """
import os, socket, sys
with socket.socket(fileno=int(sys.argv[4])) as way:
    way.sendall(repr(sorted(os.sched_getaffinity(0))).encode())
"""


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "placed"),
    [
        ((2, 2), 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ((2, 2), 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ((3,), 2, [(0, 3), (1, 2, 4, 5)]),
        ((2, 2), 5, None),
        ((2, 2), 1, None),
    ],
)
def test_ranks_keep_to_nodes_where_they_can(
    sizes: tuple[int, ...],
    num_ranks: int,
    placed: list[tuple[int, ...]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, ranks = made_host(tmp_path, monkeypatch, sizes), range(4, 4 + num_ranks)
    caplog.set_level("INFO")
    found = rank_processors(config(), ranks, host)
    assert found == ({} if placed is None else dict(zip(ranks, placed, strict=True)))
    assert not rank_processors(config(cpu_numa="off"), ranks, host)
    if sizes == (2, 2) and num_ranks == 2:
        assert "rank 4: processors 0-1,4-5 of NUMA node 0" in caplog.text


@pytest.mark.parametrize(
    ("args", "chosen"),
    [
        ({"cpu_numa": "ranks"}, {"tensor_parallel_size": 2}),
        ({"cpu_numa": "ranks", "nnodes": 2}, {"tensor_parallel_size": 4}),
        ({"cpu_numa": "replicas"}, {"data_parallel_size": 2}),
        ({"cpu_numa": "replicas", "tensor_parallel_size": 3}, {"data_parallel_size": 2}),
        ({"cpu_numa": "ranks", "tensor_parallel_size": 3}, {}),
        ({"cpu_numa": "replicas", "data_parallel_size": 4}, {}),
        ({"cpu_numa": "replicas", "device": "cuda"}, {}),
        ({"cpu_numa": "off"}, {}),
        ({}, {}),
    ],
)
def test_one_rank_per_numa_node_is_chosen_on_request(
    args: dict[str, Any], chosen: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their number is not given."""
    asked = config(**args)
    host = made_host(tmp_path / "two", monkeypatch, (2, 2))
    assert {one.field: one.value for one in choose_number_of_nodes(asked, host)} == chosen
    assert not choose_number_of_nodes(asked, made_host(tmp_path / "one", monkeypatch, (4,)))


def test_rank_starts_on_its_processors_and_its_starter_stays() -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    processes = RankProcesses(EngineConfig.from_args(model="any"), ("-c", PROGRAM), {1: (last,)})
    try:
        for rank, wanted in ((0, sorted(before)), (1, [last])):
            with processes.start(rank, "127.0.0.1") as way:
                assert way.recv(4096).decode() == repr(wanted)
    finally:
        processes.close()
    assert os.sched_getaffinity(0) == before


def test_starter_keeps_its_processors_if_a_start_fails() -> None:
    before = os.sched_getaffinity(0)

    def fail() -> None:
        with affinity((max(before),)):
            assert os.sched_getaffinity(0) == {max(before)}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.sched_getaffinity(0) == before
