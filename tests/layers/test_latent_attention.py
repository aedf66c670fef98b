# SPDX-License-Identifier: Apache-2.0
"""Tests of latent attention: its cache entry, its refusals, and its weights read back from a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import cpu
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import LatentAttentionSpec
from quire.layers.attention import attention_backends
from quire.layers.kv_cache import kv_cache_specs, why_not_captured
from tests.models.harness import load_tiny, logits_of

PROMPTS = [[5, 6, 7], list(range(40, 70))]


def test_latent_cache_has_one_vector_per_token(tiny_model: Callable[[str], Path]) -> None:
    specs = kv_cache_specs(load_tiny(tiny_model("deepseekv3"), block_size=32, kv_cache_dtype="bfloat16"))
    (group,) = group_layers(specs, 128)
    assert group.spec == LatentAttentionSpec(32, num_kv_heads=1, head_size=32 + 8, dtype_bytes=2)
    assert group.spec.block_bytes == 32 * (32 + 8) * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is not supported with latent attention"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not supported with latent attention"),
        ({"attention_backend": "torch_sdpa"}, "torch_sdpa cannot be used here: latent attention has"),
        (
            {"attention_backend": "reference", "batch_invariant": True},
            "its sums depend on the batch, and --batch-invariant forbids that",
        ),
    ],
    ids=["int8", "fp8", "sdpa", "invariant"],
)
def test_latent_attention_limits_are_refused_before_loading(
    options: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_tiny(tiny_model("deepseekv3"), **options)


def test_the_named_backend_computes_the_model(tiny_model: Callable[[str], Path]) -> None:
    models = [
        load_tiny(tiny_model("deepseekv2"), attention_backend=choice) for choice in ("auto", "reference")
    ]
    assert attention_backends(models[1]) == ["reference"]
    assert why_not_captured(models[1]) == "latent attention by reference cannot be captured"
    if cpu.available():
        assert attention_backends(models[0]) == ["cpu"]
        assert why_not_captured(models[0]) is None
    for ours, theirs in zip(*(logits_of(model, PROMPTS, chunk_sizes=[4]) for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_head_weights_return_from_the_packed_weight_file(
    quantization: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"packed_weights_cache": str(tmp_path), "quantization": quantization}
    made, mapped = (load_tiny(tiny_model("deepseekv3"), **options) for _ in range(2))
    assert len(list(tmp_path.iterdir())) == cpu.available()
    for ours, theirs in zip(
        *(logits_of(model, PROMPTS, chunk_sizes=[4]) for model in (made, mapped)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cache", ["bfloat16", "float16"])
def test_a_cache_of_16_bits_is_close(cache: str, tiny_model: Callable[[str], Path]) -> None:
    models = [load_tiny(tiny_model("deepseekv3"), kv_cache_dtype=choice) for choice in ("auto", cache)]
    for ours, theirs in zip(*(logits_of(model, PROMPTS, chunk_sizes=[4]) for model in models), strict=True):
        assert not torch.equal(ours, theirs)
        assert (ours - theirs).abs().mean() < 0.02 * theirs.abs().mean()
