# SPDX-License-Identifier: Apache-2.0
"""Ranks whose devices are joined, on devices that are the host, and torch's NCCL with gloo in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from quire.distributed import device_group
from quire.distributed.device_group import (
    STOPPED_POLLS,
    DeviceGroup,
    NcclTransport,
    RankWatchdog,
    join_devices,
)
from quire.distributed.gloo import Gloo, Store, file_store, prefix_store
from quire.errors import RankLostError, StartupError
from quire.kernels import ops
from quire.kernels.reference_collectives import tree_sum
from quire.processes import ENDED, STOPPED
from tests.distributed.test_group import on_all
from tests.fixtures.device_ways import device_ranks


@pytest.fixture
def pair() -> Iterator[list[DeviceGroup]]:
    groups = device_ranks(2)
    yield groups
    for group in groups:
        group.close()


def test_device_tensors_use_the_device_group_and_are_captured(pair: list[DeviceGroup]) -> None:
    parts = [torch.randn(3, 5, dtype=dtype) for dtype in (torch.float32,) * 2]
    got = on_all(pair, lambda group: ops.all_reduce(parts[group.rank], group))
    assert all(torch.equal(one, tree_sum(parts)) for one in got)
    assert [group._transport.num_gathered for group in pair] == [1, 1]
    assert [group.why_not_captured() for group in pair] == [None, None]


def test_tensors_of_other_devices_are_staged_on_the_host(
    pair: list[DeviceGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in pair:
        monkeypatch.setattr(group._transport, "device_type", "cuda")
    got = on_all(pair, lambda group: group.all_gather(torch.tensor([group.rank])))
    assert got == [[0, 1], [0, 1]]
    out = torch.zeros(1)
    pair[0].send(torch.ones(1), 1)
    pair[1].recv(out, 0)
    assert out.tolist() == [1.0]
    assert [(group._transport.num_gathered, group._transport.num_received) for group in pair] == [(0, 0)] * 2


def test_device_sends_use_their_channel_in_order(pair: list[DeviceGroup]) -> None:
    sent = [torch.randn(4, 3), torch.arange(5), torch.randn(2, 2).bfloat16(), torch.zeros(0, 2)]
    received = pair[1]._transport.num_received

    def pass_on(group: DeviceGroup) -> list[torch.Tensor]:
        if group.rank == 0:
            for x in sent:
                ops.send(x, group, 1)
            return sent
        got = [torch.empty_like(x) for x in sent]
        for out in got:
            ops.recv(out, group, 0)
        return got

    _, got = on_all(pair, pass_on)
    assert all(torch.equal(one, x) for one, x in zip(got, sent, strict=True))
    assert pair[1]._transport.num_received - received == len(sent)


def test_rank_lost_during_a_device_wait_is_named() -> None:
    """Whoever waits goes on when the watch has broken off, and whatever it has then is refused."""
    silent: dict[int, str] = {}
    first, second = device_ranks(2, silent=silent)
    first.check_all_alive()
    silent[1] = ENDED
    with pytest.raises(RankLostError, match=f"rank 1 is lost.*its process {ENDED}") as found:
        first.all_gather(torch.zeros(3))
    assert found.value.ranks == [1]
    with pytest.raises(RankLostError, match="rank 1 is lost"):
        first.check_all_alive()
    first.close()
    second.close()
    assert not first._transport.is_open


def test_a_failure_without_a_loss_names_those_it_may_be(pair: list[DeviceGroup]) -> None:
    pair[0]._transport.abort()
    with pytest.raises(RankLostError, match=r"rank 1 is lost.*the communicator was aborted$"):
        pair[0].all_gather(torch.zeros(3))
    for broken in (lambda: pair[0].send(torch.zeros(3), 1), lambda: pair[0].recv(torch.zeros(3), 1)):
        with pytest.raises(RankLostError, match=r"rank 1 is lost.*the communicator was aborted$"):
            broken()
    with pytest.raises(StartupError, match=r"devices cannot be connected: the communicator was aborted$"):
        pair[1].warm_up()


def test_stopped_rank_is_lost_after_several_polls() -> None:
    seen: dict[int, str] = {2: STOPPED}
    watch = RankWatchdog(lambda: seen, lambda: None, poll_s=60.0)
    assert [watch.poll() for _ in range(STOPPED_POLLS - 1)] == [None] * (STOPPED_POLLS - 1)
    seen.clear()
    assert watch.poll() is None  # it goes on
    seen[2] = STOPPED
    assert [watch.poll() for _ in range(STOPPED_POLLS)][-2:] == [None, (2, STOPPED)]
    seen[0] = ENDED
    assert watch.poll() == (2, STOPPED)
    watch.close()


class GlooAsNccl:
    """`torch.distributed.ProcessGroupNCCL` as far as it is used, of the host's tensors."""

    class Options:
        _timeout: Any = None

    def __new__(cls, store: Store, rank: int, size: int, options: Options) -> Any:
        assert options._timeout == device_group._NEVER
        asked = torch.distributed.ProcessGroupGloo._Options()
        asked._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        asked._timeout = options._timeout
        return torch.distributed.ProcessGroupGloo(store, rank, size, asked)


@pytest.fixture
def gloo_as_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in device_group._SETTINGS:
        monkeypatch.setenv(name, "0")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(device_group._torch, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device_group._torch, "ProcessGroupNCCL", GlooAsNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(NcclTransport, "device_type", "cpu")


def joined(directory: Path) -> list[Any]:
    """Return the result of two ranks that join at one store: a device group or a `StartupError` each."""

    def join(rank: int) -> Any:
        store = file_store(directory / "meet", 2)
        group = Gloo(rank, 2, store)
        try:
            return join_devices(group, prefix_store(store, "devices"), "cuda")
        except StartupError as error:
            group.close()
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(join, range(2)))


def test_nccl_transport_passes_any_dtype_and_shape(gloo_as_nccl: None, tmp_path: Path) -> None:
    groups = joined(tmp_path)
    assert all(os.environ[name] == value for name, value in device_group._SETTINGS.items())
    parts = [torch.randn(4, 6).bfloat16(), torch.randn(4, 6).bfloat16()]
    got = on_all(groups, lambda group: ops.all_gather(parts[group.rank], group, 0))
    assert all(torch.equal(one, torch.cat(parts)) for one in got)
    assert on_all(groups, lambda group: group.all_gather(torch.zeros(0, 2))[1].shape) == [(0, 2)] * 2
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    on_all(groups, lambda group: group.recv(out, 0) if group.rank else group.send(parts[0], 1))
    assert torch.equal(out, parts[0])
    for group in groups:
        group.close()


def test_devices_of_other_kinds_are_refused(
    gloo_as_nccl: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(NcclTransport):
        def __init__(self, rank: int, size: int, store: Store) -> None:
            super().__init__(rank, size, store)
            self.device_name = ("H100", "L4")[rank]

    monkeypatch.setitem(device_group.TRANSPORTS, "cuda", Other)
    for error in joined(tmp_path):
        said = "all ranks must have the same kind of device: H100 on ranks 0, L4 on ranks 1; CUDA_VISIBLE_DEVICES"
        assert str(error).startswith(said)


def test_missing_nccl_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group._torch, "is_nccl_available", lambda: False)
    with pytest.raises(StartupError, match="need NCCL, which this torch was built without"):
        NcclTransport(0, 2, file_store(tmp_path / "meet", 2))
