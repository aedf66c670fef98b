# SPDX-License-Identifier: Apache-2.0
"""Tests of the transport between ranks of one host, by the kind of their devices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.config import EngineConfig
from quire.distributed.device_group import DeviceGroup
from quire.distributed.gloo import Gloo, file_store
from quire.distributed.shared_memory import SharedMemory
from quire.engine.llm_engine import LLMEngine
from quire.errors import StartupError
from quire.executor.ranks.places import RankGroups, meet
from quire.kernels.cpu import library
from tests.distributed.test_device_group import gloo_as_nccl as gloo_as_nccl


def met(directory: Path, device: str, **shape: int) -> list[RankGroups]:
    parallel = EngineConfig.from_args(**shape).parallel
    size = parallel.num_ranks

    def join(rank: int) -> RankGroups:
        return meet(rank, parallel, file_store(directory / "meet", size), "127.0.0.1", device)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join, range(size)))


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize(("device", "way"), [("cpu", SharedMemory), ("cuda", DeviceGroup)])
def test_ranks_of_a_host_are_joined_by_their_devices(
    device: str, way: type, gloo_as_nccl: None, tmp_path: Path
) -> None:
    places = met(tmp_path, device, tensor_parallel_size=2)
    assert [type(place.shares) for place in places] == [way, way]
    assert [type(place.world) for place in places] == [Gloo, Gloo]
    assert [place.shard.group.why_not_captured() for place in places] == [None, None]
    for place in places:
        place.close()


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_devices_join_within_and_between_stages_on_any_hosts(
    num_hosts: int, gloo_as_nccl: None, tmp_path: Path
) -> None:
    places = met(tmp_path, "cuda", tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=num_hosts)
    for place in places:
        assert isinstance(place.shares, DeviceGroup)
        assert isinstance(place.stages, DeviceGroup)
        assert isinstance(place.world, Gloo)
    assert [list(place.shares.names) for place in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(place.stages.names) for place in places] == [[0, 2], [1, 3]] * 2
    for place in places:
        place.close()


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_too_few_devices_are_reported_with_their_number(
    option: str, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_args(model=str(tiny_model("llama")), device="cuda", **{option: 2})
    with pytest.raises(
        StartupError,
        match="tensor x pipeline x data parallel size is 2 on this host, but it has 0 cuda devices",
    ):
        LLMEngine(config)
