# SPDX-License-Identifier: Apache-2.0
"""The largest steps: as large as the limits say, and plans like any other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire.executor.null import NullExecutor
from quire.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    fit_states,
)
from quire.worker.calibration import Rehearsal, rehearsed_groups
from tests.worker.harness import BLOCK_SIZE, VOCAB_SIZE, tiny_config

ALL = 1 << 40
FULL = FullAttentionSpec(BLOCK_SIZE, 1, 1, 4)
WINDOW = SlidingWindowSpec(BLOCK_SIZE, 1, 1, 4, sliding_window=8)
STATE = RecurrentStateSpec(BLOCK_SIZE, 96)
ONE_GROUP = rehearsed_groups({"layer": FULL})


@pytest.mark.parametrize(
    ("limits", "prompts", "decodes"),
    [
        ({"max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 8}, [63], 8),
        ({"max_num_batched_tokens": 100, "max_model_len": 21, "max_num_seqs": 8}, [20] * 5, 8),
        ({"max_num_batched_tokens": 100, "max_model_len": 21, "max_num_seqs": 2}, [20] * 2, 2),
        ({"max_num_batched_tokens": 8, "max_model_len": 2, "max_num_seqs": 8}, [1] * 8, 8),
    ],
)
def test_steps_are_as_large_as_the_limits(limits: dict[str, int], prompts: list[int], decodes: int) -> None:
    first, second, *small = Rehearsal(tiny_config(**limits), ALL, ALL, ONE_GROUP, every_variant=True).plans()
    assert small
    assert all(plan.total_num_scheduled_tokens <= limits["max_num_batched_tokens"] for plan in small)
    assert list(first.num_scheduled_tokens.values()) == prompts
    assert list(second.num_scheduled_tokens.values()) == [1] * decodes


def test_a_device_may_rehearse_less() -> None:
    (first,) = Rehearsal(tiny_config(max_num_seqs=8), 32, 0, ONE_GROUP).plans()
    assert list(first.num_scheduled_tokens.values()) == [32]
    _, decodes = Rehearsal(tiny_config(max_num_seqs=8), 32, 1, ONE_GROUP).plans()
    assert list(decodes.num_scheduled_tokens.values()) == [1]


@pytest.mark.parametrize("layers", [[FULL], [FULL, WINDOW, FULL], [FULL, STATE, WINDOW]])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 100, "max_model_len": 21}], ids=str)
def test_rehearsed_plans_pass_all_checks(limits: dict[str, Any], layers: list[KVCacheSpec]) -> None:
    config = tiny_config(**limits)
    specs = fit_states({f"layer {index}": spec for index, spec in enumerate(layers)})
    groups = rehearsed_groups(specs)
    assert len(groups) == (3 if STATE in layers else 1)
    rehearsal = Rehearsal(config, ALL, ALL, groups, every_variant=True)
    executor = NullExecutor(dataclasses.replace(config, model_arch=None), specs=specs, vocab_size=VOCAB_SIZE)
    executor.initialize_kv_cache(KVCacheConfig(rehearsal.num_blocks, groups, specs))
    for plan in rehearsal.plans():
        assert not executor.execute_model(plan).failed
