"""Each rank of a host sees one device, and where there are too few that is said."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.executor.own_device import take_own_device


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
def test_it_is_the_one_of_its_number(
    before: dict[str, str], after: dict[str, str], devices: pytest.MonkeyPatch
) -> None:
    take_own_device("cuda", 2, 4, before)
    assert before == after


def test_more_ranks_than_devices_are_refused(devices: pytest.MonkeyPatch) -> None:
    said = (
        "5 ranks of this host want a cuda device each, and there are 4: --tensor-parallel-size times "
        "--pipeline-parallel-size may be 4 at most for each of --nnodes"
    )
    with pytest.raises(ConfigError, match=said):
        take_own_device("cuda", 0, 5, {})
    devices.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"there are 0: .* may be 1 at most"):
        take_own_device("cuda", 0, 2, {})


def test_a_program_that_has_used_a_device_is_told(devices: pytest.MonkeyPatch) -> None:
    devices.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"rank 1 cannot have .* make the engine first"):
        take_own_device("cuda", 1, 2, {})


def test_ranks_of_the_cpu_share_it() -> None:
    environ: dict[str, str] = {}
    take_own_device("cpu", 9, 99, environ)
    assert environ == {}
