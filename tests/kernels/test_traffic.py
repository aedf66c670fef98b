# SPDX-License-Identifier: Apache-2.0
"""Tests of the bytes that a call must read, counted from its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library
from quire.kernels.formats import FORMATS
from quire.kernels.linear import WeightScheme
from tests.fixtures.folded import folded
from tests.kernels.op_cases import int8_caches, make_metadata, randn, randn_caches, random_experts

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import attention, experts
from quire.kernels.cpu.calls import RecordedCall, recording
from quire.kernels.cpu.traffic import num_bytes


def arguments_of(call: Callable[[], Tensor]) -> bytes:
    calls: list[RecordedCall] = []
    with recording.into(calls.append):
        call()
    return calls[0][1]


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_attention_reads_the_keys_and_values_of_every_token(cache: torch.dtype) -> None:
    metadata = make_metadata([(1, 9), (3, 33)], block_size=8, num_blocks=16)
    caches = int8_caches(16, 2, 8, 24) if cache == torch.int8 else randn_caches(16, 2, 8, 24, cache)
    packed = arguments_of(lambda: attention.paged_attention(randn(4, 4, 24), *caches, metadata, 0.2))
    vector = 24 + 4 if cache == torch.int8 else 24 * cache.itemsize
    assert num_bytes("paged_attention", packed) == 2 * (9 + 33) * 2 * vector


def test_experts_that_are_chosen_are_read() -> None:
    of = random_experts(8, 128, 64, WeightScheme("int8"), torch.float32)
    chosen = torch.tensor([[1, 2], [2, 5]], dtype=torch.int32)
    packed = arguments_of(lambda: experts.experts(randn(2, 128), chosen, torch.rand(2, 2), of))
    weights, scales = 3 * 128 * 64, 4 * (2 * 64 + 128)
    assert num_bytes("experts", packed) == 3 * (weights + scales)


@folded("kind", FORMATS)
def test_every_kind_of_weights_is_counted(kind: str) -> None:
    group = 0 if kind == "float" else 32
    of = random_experts(2, 128, 64, WeightScheme(kind, group), torch.float32)
    chosen = torch.tensor([[0]], dtype=torch.int32)
    packed = arguments_of(lambda: experts.experts(randn(1, 128), chosen, torch.rand(1, 1), of))
    numbers = 3 * 128 * 64
    scales = {"float": 0, "int4": 2, "int6": 2, "int8": 2}.get(kind, 4) * numbers // 32
    bits = {"float": 32, "int8": 8, "int6": 6, "fp8": 8}.get(kind, 4)
    assert num_bytes("experts", packed) == numbers * bits // 8 + scales
