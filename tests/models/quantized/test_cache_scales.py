# SPDX-License-Identifier: Apache-2.0
"""Scales of keys and values, as checkpoints call them: the numbers of transformers with a cache that rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.attention import Attention
from quire.layers.attention_parts import CacheScales, for_all_heads
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.weight_files import SINGLE_NAME
from tests.kernels import triton_interpreter
from tests.models.harness import load_tiny, logits_of
from tests.models.quantized.checkpoints import IDS, write
from tests.models.quantized.test_published_encodings import compressed, fp8, group

SCALES = {"k_scale": [torch.tensor(0.004), torch.tensor([0.5])], "v_scale": [torch.tensor(0.02)] * 2}
FP8_GROUP = group(num_bits=8, type="float", strategy="tensor")
FORMS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "compressed-tensors": (
        compressed("float-quantized", FP8_GROUP, kv_cache_scheme={"num_bits": 8, "type": "float"}),
        ("k_scale", "v_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "kv_cache_scheme": "static"},
        ("k_proj.output_scale", "v_proj.output_scale"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        ("k_proj.k_scale", "v_proj.v_scale"),
    ),
}


def checkpoint(llama: Path, tmp_path: Path, form: str, scales: dict[str, list[Tensor]]) -> tuple[Path, Path]:
    config, names = FORMS[form]
    quantized, floats = write(llama, tmp_path, config, fp8(0, scalar=True), lambda name: name != "lm_head")
    tensors = load_file(quantized / SINGLE_NAME)
    for name, kind in zip(names, ("k_scale", "v_scale"), strict=True):
        for layer, scale in enumerate(scales[kind]):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scale.clone()
    save_file(tensors, quantized / SINGLE_NAME)
    return quantized, floats


def rounded_cache(scales: dict[str, list[Tensor]] | None) -> Any:
    """transformers' cache, which gives back what E4M3 holds of keys and values, less their scales."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
        ) -> Any:
            both = super().update(key_states, value_states, layer_idx, *args, **more)
            return tuple(
                held(x, 1.0 if scales is None else scales[kind][layer_idx])
                for x, kind in zip(both, SCALES, strict=True)
            )

    return Rounded()


def held(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture
def fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fp8 cache of a GPU, with the kernels' oracles."""
    triton_interpreter.use_reference(monkeypatch)
    monkeypatch.setattr("quire.layers.attention.kv_cache_dtype", lambda config: torch.float8_e4m3fn)


@torch.inference_mode()
def expected(floats: Path, scales: dict[str, list[Tensor]] | None) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    return model(torch.tensor(IDS), past_key_values=rounded_cache(scales)).logits[0]


def logits(model: CausalLM) -> Tensor:
    return logits_of(model, IDS, chunk_sizes=[5])[0]


@pytest.mark.usefixtures("fp8_cache")
@pytest.mark.parametrize("form", FORMS)
def test_kv_cache_has_the_checkpoints_scales(form: str, llama: Path, tmp_path: Path) -> None:
    quantized, floats = checkpoint(llama, tmp_path, form, SCALES)
    want, without = expected(floats, SCALES), expected(floats, None)
    got = logits(load_tiny(quantized))
    error = (got - want).abs().max()
    assert error < 1e-4 * want.abs().max()
    assert error < 0.01 * (without - want).abs().max(), "the scales make a difference"


@pytest.mark.parametrize("rank", [0, 1])
def test_heads_may_have_scales_of_their_own(rank: int) -> None:
    """Scores and outputs of the heads on one rank are those of the dequantized cache."""
    random = torch.Generator().manual_seed(0)
    keys, values = torch.rand(4, 1, 1, generator=random) + 0.1, torch.rand(4, generator=random) + 0.1
    scales = CacheScales.of_rank(*(for_all_heads(each, 4) for each in (keys, values)), Shard(rank, 2), "attn")
    q, k, v = (torch.randn(3, heads, 8, generator=random) for heads in (4, 2, 2))
    stored = [each.to(torch.float8_e4m3fn).float() for each in scales.stored(k, v)]
    own = slice(2 * rank, 2 * rank + 2)
    want_k, want_v = stored[0] * keys[own, 0], stored[1] * values[own, None]
    for head in range(4):
        scores = (scales.of_queries(q)[:, head] * stored[0][:, head // 2]).sum(-1)
        torch.testing.assert_close(scores, (q[:, head] * want_k[:, head // 2]).sum(-1))
    mixed = stored[1].repeat_interleave(2, 1)
    torch.testing.assert_close(scales.of_outputs(mixed), want_v.repeat_interleave(2, 1))


@pytest.mark.usefixtures("fp8_cache")
@pytest.mark.parametrize(
    ("scale", "message"), [(torch.ones(3), "has 3 numbers"), (torch.zeros(1), "holds 0.0")]
)
def test_malformed_scale_is_refused(scale: Tensor, message: str, llama: Path, tmp_path: Path) -> None:
    path, _ = checkpoint(llama, tmp_path, "compressed-tensors", SCALES | {"v_scale": [scale, scale]})
    with pytest.raises(ModelLoadError, match=f"layers.0.self_attn.v_scale' {message}"):
        load_tiny(path)


INT8_SCALES = {"k_scale": [torch.tensor(0.02), torch.tensor([0.05])], "v_scale": [torch.tensor(0.004)] * 2}
"""The second layer's keys reach beyond it, and the values of both."""


def in_int8(scales: dict[str, list[Tensor]]) -> Any:
    """transformers' cache, which gives back what integers of 8 bits hold."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **more: Any
        ) -> Any:
            both = super().update(key_states, value_states, layer_idx, *args, **more)
            return tuple(
                (x / (scale := scales[kind][layer_idx])).round().clamp(-128, 127) * scale
                for x, kind in zip(both, scales, strict=True)
            )

    return Rounded()


def int8_checkpoint(
    llama: Path, tmp_path: Path, scales: dict[str, list[Tensor]], **said: Any
) -> tuple[Path, Path]:
    quantized, floats = checkpoint(llama, tmp_path, "compressed-tensors", scales)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "int"} | said
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, floats


def test_integers_of_8_bits_have_the_scales_of_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    quantized, floats = int8_checkpoint(llama, tmp_path, INT8_SCALES, strategy="tensor", dynamic=False)
    model = load_tiny(quantized, kv_cache_dtype="int8")
    without, _ = int8_checkpoint(llama, tmp_path / "without", INT8_SCALES, dynamic=True)
    own = load_tiny(without, kv_cache_dtype="int8")
    with torch.inference_mode():
        from transformers import AutoModelForCausalLM

        by_transformers = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
        want = by_transformers(torch.tensor(IDS), past_key_values=in_int8(INT8_SCALES)).logits[0]
    error = (logits(model) - want).abs().max()
    assert error < 1e-4 * want.abs().max()
    assert error < 0.01 * (logits(own) - want).abs().max(), "the scales make a difference"


@pytest.mark.parametrize(
    ("said", "leaf"), [({"symmetric": False}, ""), ({"dynamic": True}, ""), ({}, "self_attn.v_scale")]
)
def test_integers_without_both_scales_find_their_own(
    said: dict[str, Any], leaf: str, llama: Path, tmp_path: Path
) -> None:
    path, _ = int8_checkpoint(llama, tmp_path, INT8_SCALES, **said)
    tensors = load_file(path / SINGLE_NAME)
    save_file(
        {name: each for name, each in tensors.items() if not leaf or not name.endswith(leaf)},
        path / SINGLE_NAME,
    )
    model = load_tiny(path, kv_cache_dtype="int8")
    assert all(each.int8_scales is None for each in model.modules() if isinstance(each, Attention))


def test_a_cache_of_another_type_leaves_them_out(llama: Path, tmp_path: Path) -> None:
    path, _ = checkpoint(llama, tmp_path, "compressed-tensors", SCALES)
    model = load_tiny(path, kv_cache_dtype="int8")
    assert all(each.cache_scales is None for each in model.modules() if isinstance(each, Attention))


@pytest.mark.usefixtures("fp8_cache")
@pytest.mark.parametrize("family", ["qwen3", "gptneox", "bloom"])
def test_scales_of_1_change_nothing(family: str, tiny_model: Callable[[str], Path]) -> None:
    """With norms of heads, part of a head rotated, or nothing: the bits of the kernel that does it all at once."""
    without, scaled = (load_tiny(tiny_model(family)) for _ in range(2))
    for layer in scaled.modules():
        if isinstance(layer, Attention):
            layer.cache_scales = CacheScales(*(torch.ones(layer.num_kv_heads) for _ in range(2)))
    assert torch.equal(logits(scaled), logits(without))
