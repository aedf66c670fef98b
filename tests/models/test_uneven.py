# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ in size or lack parts, by config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.arch import LayerShape, ModelArch, Skip
from quire.engine.rank_checks import valid_tp_sizes
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.layers.kv_cache import kv_cache_specs
from quire.layers.shard import Shard
from quire.models.decoder import DecoderForCausalLM
from quire.models.families.llama_like import read_solar
from quire.models.families.uneven import read_decilm, read_openelm
from quire.models.json_object import JsonObject
from quire.models.loader import without_weights
from tests.fixtures.folded import folded
from tests.fixtures.plain_llamas import KEYS, PLAIN_LLAMAS
from tests.models.harness import prepared_config

Reader = Callable[[str, JsonObject], ModelArch]


def read(reader: Reader, name: str, **values: Any) -> ModelArch:
    return reader("X", JsonObject("config.json", PLAIN_LLAMAS[name].config | values))


def test_each_layer_keeps_keys_and_values_of_its_own_heads(tiny_model: Callable[[str], Path]) -> None:
    model = without_weights(prepared_config(tiny_model("openelm")))
    assert tuple(spec.num_kv_heads for spec in kv_cache_specs(model).values()) == KEYS  # type: ignore[attr-defined]


def test_layers_that_do_not_attend_keep_nothing(tiny_model: Callable[[str], Path]) -> None:
    model = without_weights(prepared_config(tiny_model("nemotron-nas")))
    layers = [name.split(".")[2] for name in kv_cache_specs(model)]
    assert layers == ["0", "2", "4", "5"]


def test_ranks_share_every_layer_or_none(tiny_model: Callable[[str], Path]) -> None:
    """Three layers have 2, 4 and 6 heads."""
    assert valid_tp_sizes(prepared_config(tiny_model("openelm"))) == [1, 2]


def test_openelm_rounds_widths_to_its_divisor_and_never_far_down() -> None:
    arch = read(read_openelm, "openelm", ffn_dim_divisor=32, ffn_multipliers=[0.74, 0.1, 2.0])
    assert [shape.intermediate_size for shape in arch.layer_shapes] == [64, 32, 128]
    assert arch.intermediate_size == 128


def test_a_search_leaves_parts_of_layers() -> None:
    arch = read(read_decilm, "nemotron-nas")
    assert arch.layer_shapes[:4] == (
        LayerShape(4, 2, 256),
        LayerShape(4, 1, 512),
        LayerShape(4, 1, 1, "mixer"),
        LayerShape(4, 1, 1, "empty"),
    )
    assert [arch.block_of(layer) for layer in range(4)] == ["sequential", "mlp", "mixer", "empty"]


def block(**parts: Any) -> list[dict[str, Any]]:
    whole = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}}
    return [{key: part | parts.get(key, {}) for key, part in whole.items()}] * 6


@folded(
    ("reader", "name", "values", "error", "words"),
    [
        (
            read_openelm,
            "openelm",
            {"num_kv_heads": [1, 2]},
            ModelLoadError,
            "num_kv_heads must be a list with a",
        ),
        (
            read_openelm,
            "openelm",
            {"num_kv_heads": [1, 2, 4]},
            ModelLoadError,
            r"layer 2 a divisor .* \(6\), not 4",
        ),
        (read_openelm, "openelm", {"num_query_heads": [1, 2, 2.5]}, ModelLoadError, "a list of integers in"),
        (read_openelm, "openelm", {"ffn_with_glu": False}, UnsupportedModelError, "ffn_with_glu = false"),
        (
            read_decilm,
            "nemotron-nas",
            {"block_configs": block(attention={"replace_with_linear": True})},
            UnsupportedModelError,
            r"block_configs\[0\]: attention: replace_with_linear = true",
        ),
        (
            read_decilm,
            "nemotron-nas",
            {"block_configs": block(attention={"n_heads_in_group": 3})},
            ModelLoadError,
            r"n_heads_in_group must be a divisor of num_attention_heads \(4\), got 3",
        ),
        (read_decilm, "nemotron-nas", {"block_configs": [1]}, ModelLoadError, "a list of JSON objects"),
        (read_decilm, "nemotron-nas", {"block_configs": []}, ModelLoadError, "num_hidden_layers entries"),
        (read_solar, "solar", {"bskcn_tv": [0.9]}, ModelLoadError, "two numbers in"),
        (read_solar, "solar", {"bskcn_1": [9]}, ModelLoadError, "a list of layers, 0 to 5"),
        (read_solar, "solar", {"bskcn_3": [0]}, ModelLoadError, "at or after the first of bskcn_1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    reader: Reader, name: str, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(reader, name, **values)


def test_a_skip_starts_where_the_last_one_before_it_does() -> None:
    arch = read(read_solar, "solar")
    assert arch.skips == (Skip(1, 2, 0.8), Skip(3, 5, 0.8), Skip(2, 4, 0.8), Skip(2, 5, 0.8))


def test_a_rank_has_its_share_of_each_layer(tiny_model: Callable[[str], Path]) -> None:
    config = prepared_config(tiny_model("openelm"))
    rank = without_weights(config, Shard(rank=1, of=2))
    assert isinstance(rank, DecoderForCausalLM)
    widths = [layer.mlp.down_proj.matrix_shape()[1] for layer in rank.model.layers]
    assert widths == [shape.intermediate_size // 2 for shape in config.arch.layer_shapes]
