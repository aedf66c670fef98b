# SPDX-License-Identifier: Apache-2.0
"""Device of each rank of a host, and the error where there are too few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.config.device import HostShare
from quire.errors import ConfigError
from quire.executor.uniproc import select_own_device


def config(**args: Any) -> EngineConfig:
    return EngineConfig.from_args(**{"device": "cuda"} | args)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"CUDA_VISIBLE_DEVICES": "7, 5,3,1"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({"HIP_VISIBLE_DEVICES": "3,2,1,0"}, {"HIP_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,MIG-c,GPU-d"}, {"CUDA_VISIBLE_DEVICES": "MIG-c"}),
    ],
    ids=str,
)
def test_own_device_has_the_rank_number(
    before: dict[str, str], after: dict[str, str], devices: pytest.MonkeyPatch
) -> None:
    select_own_device(config(tensor_parallel_size=4), 2, before)
    assert before == after


@pytest.mark.parametrize(
    ("args", "share", "rank", "number"),
    [
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, None, 3, "3"),
        ({"tensor_parallel_size": 4, "nnodes": 2, "node_rank": 1}, None, 3, "1"),
        ({}, HostShare(3, 0, index=2), 0, "2"),
        ({"tensor_parallel_size": 2}, HostShare(2, 0, index=1), 1, "3"),
    ],
)
def test_ranks_of_all_stages_and_replicas_of_a_host_are_counted(
    args: dict[str, int], share: HostShare | None, rank: int, number: str, devices: pytest.MonkeyPatch
) -> None:
    environ: dict[str, str] = {}
    select_own_device(replace(config(**args), share=share), rank, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": number}


def test_more_ranks_than_devices_are_refused(devices: pytest.MonkeyPatch) -> None:
    said = "tensor x pipeline x data parallel size is 5 on this host, but it has 4 cuda devices: .* at most 4"
    with pytest.raises(ConfigError, match=said):
        select_own_device(config(tensor_parallel_size=5), 0, {})
    devices.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"data parallel size is 2 .* it has 0 cuda devices: .* may be at most 1"
    ):
        select_own_device(replace(config(), share=HostShare(2, 0)), 0, {})


def test_program_that_has_used_a_device_is_refused(devices: pytest.MonkeyPatch) -> None:
    devices.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"rank 1 cannot select .* create the engine first"):
        select_own_device(config(tensor_parallel_size=2), 1, {})


@pytest.mark.parametrize("args", [{"device": "cpu", "tensor_parallel_size": 99}, {"device": "cuda"}])
def test_cpu_ranks_and_a_single_rank_select_no_device(args: dict[str, Any]) -> None:
    environ: dict[str, str] = {}
    select_own_device(config(**args), 0, environ)
    assert environ == {}
