# SPDX-License-Identifier: Apache-2.0
"""Tests of the cache specs that attention layers declare, and of the caches that they are bound to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from quire.layers.attention import Attention, attention_backends, kv_cache_dtype
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs, why_not_captured
from quire.models.base import CausalLM
from tests.models.harness import load_tiny, logits_of, prepared_config


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
    layer = attention_layers(model)[0]
    layer.bind(0, spec, torch.empty(3, spec.block_bytes, dtype=torch.uint8))
    assert layer.v_cache.shape[1:] == (spec.num_kv_heads, spec.block_size, spec.head_size + 4)
    assert layer.k_cache.shape[1:] == (spec.num_kv_heads, spec.head_size + 4, spec.block_size)


def attention_layers(model: CausalLM) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def test_layers_of_different_groups_share_memory_block_by_block(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("gemma3"))
    specs = kv_cache_specs(model)
    groups = group_layers(specs, 64)
    kv_config = KVCacheConfig(5, groups, specs)
    tensors = allocate_kv_cache(kv_config, torch.device("cpu"))
    assert [len(group.layer_names) for group in groups] == [2, 2]
    assert (
        sum(tensor.nbytes for tensor in tensors)
        == kv_config.bytes
        == 5 * 2 * next(iter(specs.values())).block_bytes
    )
    for tensor in tensors:
        tensor.zero_()
    bind_kv_cache(model, kv_config, tensors)
    windowed, full, _, _ = attention_layers(model)
    assert (full.group_id, windowed.group_id) == (0, 1)
    windowed.k_cache[2 * 2], windowed.v_cache[2 * 3] = 1.0, 2.0
    assert full.k_cache[::2].flatten(1).sum(1).nonzero().tolist() == [[2]]
    assert full.v_cache[::2].flatten(1).sum(1).nonzero().tolist() == [[3]]


def test_a_layer_that_needs_a_part_of_a_block_uses_the_first(tiny_model: Callable[[str], Path]) -> None:
    layer = attention_layers(load_tiny(tiny_model("llama")))[0]
    spec = layer.kv_cache_spec()
    assert isinstance(spec, FullAttentionSpec)
    window = SlidingWindowSpec(
        spec.block_size, 3 * spec.num_kv_heads, spec.head_size, spec.dtype_bytes, sliding_window=8
    )
    specs = {"wide": window, layer.name: spec}
    kv_config = KVCacheConfig(4, group_layers(specs, 64), specs)
    assert [kv_config.parts_per_block(group) for group in kv_config.groups] == [6, 2]
    (tensor,) = allocate_kv_cache(kv_config, torch.device("cpu"))
    layer.bind(1, spec, tensor.zero_())
    layer.k_cache[6 * 3], layer.v_cache[6 * 1] = 1.0, 1.0
    keys, values, _ = tensor.split_with_sizes([spec.block_bytes // 2] * 2 + [2 * spec.block_bytes], dim=1)
    assert keys.any(1).tolist() == [False, False, False, True]
    assert values.any(1).tolist() == [False, True, False, False]
    assert tensor.count_nonzero() == keys.count_nonzero() + values.count_nonzero()


def test_binding_wants_one_spec_per_layer(tiny_model: Callable[[str], Path]) -> None:
    model = load_tiny(tiny_model("llama"))
    name, spec = next(iter(kv_cache_specs(model).items()))
    with pytest.raises(AssertionError, match="one spec for each layer with a cache"):
        bind_kv_cache(model, KVCacheConfig(3, (KVCacheGroup((name,), spec),), {name: spec}), [])


@pytest.mark.parametrize("name", ["torch_sdpa", "reference"])
def test_the_named_backend_computes_the_model(name: str, tiny_model: Callable[[str], Path]) -> None:
    prompts = [[5, 6, 7], list(range(40, 70))]
    models = [load_tiny(tiny_model("mistral"), attention_backend=choice) for choice in ("auto", name)]
    assert attention_backends(models[1]) == [name]
    for ours, theirs in zip(*(logits_of(model, prompts, chunk_sizes=[4]) for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)


def test_backend_unfit_for_the_model_is_refused_before_loading(
    tiny_model: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match="torch's attention cannot cap the model's scores softly"):
        load_tiny(tiny_model("gemma2"), attention_backend="torch_sdpa")


@pytest.mark.parametrize(
    ("cache", "device", "message"),
    [("fp8", "cpu", "fp8 needs a GPU"), ("int8", "cuda", "int8 needs a CPU, and the device is cuda")],
)
def test_a_cache_precision_of_another_device_is_refused(
    cache: str, device: str, message: str, tiny_model: Callable[[str], Path]
) -> None:
    config = prepared_config(tiny_model("llama"), kv_cache_dtype=cache)
    config = config.evolve(device=device)
    with pytest.raises(ConfigError, match=message):
        kv_cache_dtype(config)


def test_backend_without_capture_gives_the_reason(tiny_model: Callable[[str], Path]) -> None:
    backends = ("auto", "reference")
    models = [
        load_tiny(tiny_model("llama"), attention_backend=name, load_format="dummy") for name in backends
    ]
    assert why_not_captured(models[1]) == "attention by reference cannot be captured"
    assert why_not_captured(object()) is None
    if cpu.available():
        assert why_not_captured(models[0]) is None
