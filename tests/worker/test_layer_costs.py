# SPDX-License-Identifier: Apache-2.0
"""One layer of each kind is timed alone, and the costs decide the split into stages. No test reads a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig
from quire.layers.shard import WHOLE, Shard
from quire.models.loader import without_weights
from quire.models.stages import balanced, in_units, stack_of
from quire.worker.stage_sizes import LayerCosts, kinds_of, layer_costs, why_not_measured
from tests.fixtures.quick import SOME_MODELS, quick_models
from tests.models.harness import prepared_config
from tests.models.test_stages import EVERY_FAMILY

LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
TOGETHER = {"gemma3n", "gemma4"}
"""Families of which some layers share keys and values."""


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.stage_sizes.NUM_TIMED", 1)
    monkeypatch.setattr("quire.worker.stage_sizes.CACHES_BYTES", 1 << 10)


def kinds_in(model_dir: Path, **args: Any) -> list[list[int]]:
    model = without_weights(prepared_config(model_dir, **args))
    return kinds_of(stack_of(model).layers)


@pytest.mark.parametrize(
    "name", quick_models(sorted(EVERY_FAMILY - TOGETHER), {*SOME_MODELS, "rwkv7", "zamba2"})
)
def test_layers_of_every_family_are_timed_alone(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Sparse ones and hybrids among them; whoever made random numbers before goes on as if nothing had been."""
    whole, random = without_weights(prepared_config(tiny_model(name), **LIMITS)), torch.get_rng_state()
    assert why_not_measured(whole) is None
    found = layer_costs(whole, WHOLE)
    assert len(found.of_layers()) == whole.config.arch.num_layers
    assert min(found.of_layers()) > 0
    assert found.behind > 0
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", ["bert-texts", "modernbert-tokens", "embedding-gemma"])
def test_layers_of_encoders_are_timed_alone(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    whole = without_weights(prepared_config(tiny_encoder(name), **LIMITS))
    assert len(layer_costs(whole, WHOLE).of_layers()) == whole.config.arch.num_layers


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_layers_are_timed_in_the_format_that_they_are_kept_in(
    method: str, tiny_model: Callable[[str], Path]
) -> None:
    whole = without_weights(prepared_config(tiny_model("llama"), quantization=method, **LIMITS))
    assert min(layer_costs(whole, WHOLE).of_layers()) > 0


def test_layers_are_of_a_kind_if_nothing_that_costs_differs(tiny_model: Callable[[str], Path]) -> None:
    """A window does, and experts, a state, and a format that some have; a name, or a number, does not."""
    assert kinds_in(tiny_model("llama")) == [[0, 1, 2]]
    assert kinds_in(tiny_model("deepseekv3")) == [[0], [1, 2]]
    assert kinds_in(tiny_model("gemma3")) == [[0, 2], [1, 3]]
    assert kinds_in(tiny_model("qwen3next")) == [[0, 1], [2], [3]]
    assert kinds_in(tiny_model("bamba")) == [[0, 2], [1]]
    ignore = {"quantization": "int8", "quantization_config": {"ignore": ["model.layers.1.mlp"]}}
    assert kinds_in(tiny_model("llama"), **ignore) == [[0, 2], [1]]


def test_a_costly_layer_gets_a_stage_of_its_own(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a costly head few layers; one layer of each kind is timed, with neither end if there is such a one."""
    timed = []

    def seconds(config: EngineConfig, shard: Shard, cache: KVCacheConfig, own: range, num: int) -> float:
        timed.append(own)
        return {range(1, 2): 1e-3, range(3, 4): 9e-3}.get(own, 2e-3)

    monkeypatch.setattr("quire.worker.stage_sizes.time_layers", seconds)
    monkeypatch.setattr("quire.worker.stage_sizes.kinds_of", lambda layers: [[0, 1, 2, 4, 5], [3]])
    config = prepared_config(tiny_model("llama"), hf_overrides={"num_hidden_layers": 6})
    found = layer_costs(without_weights(config), WHOLE)
    assert timed == [range(1, 2), range(3, 4), range(6, 6)]
    assert found.of_layers() == [1e-3, 1e-3, 1e-3, 9e-3, 1e-3, 3e-3]
    assert balanced(in_units(found.of_layers()), 3) == (3, 1, 2)
    assert str(found) == "5 of 1 ms, 1 of 9 ms, and 2 ms for norm and head"
    assert balanced(in_units(LayerCosts([([*range(8)], 1e-3)], 4e-3).of_layers()), 2) == (6, 2)


def test_reason_for_not_timing_layers_is_given(tiny_model: Callable[[str], Path]) -> None:
    whole = without_weights(prepared_config(tiny_model("gemma3n")))
    assert "share keys and values" in str(why_not_measured(whole))
