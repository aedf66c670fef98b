"""What attention layers say they need, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from quire.layers.attention import Attention, bind_kv_cache, kv_cache_dtype, kv_cache_shape, kv_cache_specs
from tests.models.harness import load_tiny, prepared_config


def test_specs_say_which_layers_have_a_window(tiny_model: Callable[[str], Path]) -> None:
    specs = kv_cache_specs(load_tiny(tiny_model("gemma2"), block_size=32))
    assert list(specs) == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
    window = SlidingWindowSpec(32, num_kv_heads=2, head_size=24, dtype_bytes=4, sliding_window=8)
    full = FullAttentionSpec(32, num_kv_heads=2, head_size=24, dtype_bytes=4)
    assert list(specs.values()) == [window, full, window]
    assert full.block_bytes == 2 * 32 * 2 * 24 * 4


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_every_layer_has_its_own_name(name: str, tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model(name))
    assert len(kv_cache_specs(model)) == model.config.arch.num_layers


def test_cache_dtype_is_the_activations_unless_named(tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("llama")
    assert kv_cache_dtype(prepared_config(directory, dtype="bfloat16")) == torch.float32
    assert kv_cache_dtype(prepared_config(directory, kv_cache_dtype="float16")) == torch.float16
    specs = kv_cache_specs(load_tiny(directory, kv_cache_dtype="float16", load_format="dummy"))
    assert {spec.dtype_bytes for spec in specs.values() if isinstance(spec, FullAttentionSpec)} == {2}


def test_an_int8_cache_has_room_for_scales(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("llama"), kv_cache_dtype="int8", load_format="dummy")
    spec = next(iter(kv_cache_specs(model).values()))
    assert isinstance(spec, FullAttentionSpec)
    assert (spec.dtype_bytes, spec.scale_bytes) == (1, 4)
    shape = kv_cache_shape(spec, 3)
    assert shape == (2, 3, spec.num_kv_heads, spec.block_size, spec.head_size + 4)
    assert torch.empty(shape, dtype=torch.int8).nbytes == 3 * spec.block_bytes


def test_binding_shares_memory(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("llama"))
    caches = {name: torch.zeros(2, 3, 2, 4, 16) for name in kv_cache_specs(model)}
    bind_kv_cache(model, caches)
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    layer.k_cache.fill_(1.0)
    layer.v_cache.fill_(2.0)
    assert caches[layer.name].flatten(1).mean(1).tolist() == [1.0, 2.0]


def test_binding_wants_one_cache_per_layer(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("llama"))
    with pytest.raises(AssertionError, match="one cache per attention layer"):
        bind_kv_cache(model, {"model.layers.0.self_attn.attn": torch.zeros(2, 3, 2, 4, 16)})
