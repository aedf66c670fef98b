# SPDX-License-Identifier: Apache-2.0
"""Models whose layers differ in size: OpenELM by design, Deci's by architecture search."""

from __future__ import annotations

from typing import Any

from quire.config.arch import CheckpointNames, LayerShape, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    read_arch,
    read_head_dim,
    read_llama,
    rms_eps,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, read_rope

_OPENELM_KEYS = {
    "hidden_size": "model_dim",
    "num_hidden_layers": "num_transformer_layers",
    "max_position_embeddings": "max_context_length",
    "rope_theta": "rope_freq_constant",
    "tie_word_embeddings": "share_input_output_layers",
}
_OPENELM_NAMES = CheckpointNames(
    {
        "model": "transformer",
        "embed_tokens": "token_embeddings",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "mlp": "ffn",
        "gate_up_proj": "proj_1",
        "down_proj": "proj_2",
    },
    merged={},
)


_PER_LAYER = "num_key_value_heads_per_layer"


def read_openelm(architecture: str, config: JsonObject) -> ModelArch:
    """OpenELM (Mehta et al., 2024, arXiv:2404.14619): deeper layers have more heads and wider MLPs."""
    config = config.with_aliases(_OPENELM_KEYS)
    config.only("activation_fn_name", "swish")
    config.only("normalization_layer_name", "rms_norm")
    config.only("ffn_with_glu", True)
    head_dim = config.integer("head_dim", high=MAX_WIDTH)
    heads, kv_heads = _of_layers(config, "num_query_heads"), _of_layers(config, "num_kv_heads")
    shapes = tuple(map(LayerShape, heads, kv_heads, _openelm_widths(config)))
    _check(config, "num_kv_heads", shapes)
    return read_arch(
        architecture,
        config,
        **_largest(shapes),
        names=_OPENELM_NAMES,
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim),
        norm_eps=rms_eps(config, 1e-6),
        qk_norm="rms" if config.flag("normalize_qk_projections", False) else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(False),
    )


def read_decilm(architecture: str, config: JsonObject) -> ModelArch:
    """DeciLM 7B (Deci, 2023), with grouped keys in groups of many sizes, and Nemotron-NAS (arXiv:2411.19146)."""
    if "block_configs" in config:
        return _read_nemotron_nas(architecture, config)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    width = config.integer("intermediate_size", high=MAX_WIDTH)
    shapes = tuple(LayerShape(heads, kv_heads, width) for kv_heads in _of_layers(config, _PER_LAYER))
    _check(config, _PER_LAYER, shapes)
    return read_llama(
        architecture, config, norm_eps=rms_eps(config, 1e-5), **biases(False), **_largest(shapes)
    )


def _read_nemotron_nas(architecture: str, config: JsonObject) -> ModelArch:
    """Nemotron-NAS: a Llama whose layers were shrunk, or lost attention or MLP, in architecture search."""
    blocks = config.children("block_configs")
    if len(blocks) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong("block_configs", "a list with num_hidden_layers entries")
    shapes = tuple(_shape(config, block) for block in blocks)
    attends = [not block.child("attention").flag("no_op", False) for block in blocks]
    renamed = {
        f"layers.{layer}.input_layernorm": "post_attention_layernorm"
        for layer, does in enumerate(attends)
        if not does
    }
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(renamed),
        head_dim=read_head_dim(config, config.integer("num_attention_heads", high=MAX_HEADS)),
        norm_eps=rms_eps(config, 1e-5),
        layer_types=tuple(FULL if does else "mlp" for does in attends),
        **_largest(shapes),
    )


def _shape(config: JsonObject, block: JsonObject) -> LayerShape:
    """Return a layer's shape; missing parts have size 1, as nothing is allocated for them."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    attention, mlp = block.child("attention"), block.child("ffn")
    for part in (attention, mlp):
        part.only("replace_with_linear", False)
        part.only("sparsify")
    for key in ("window_length", "num_sink_tokens"):
        attention.only(key)
    attention.only("unshifted_sink", False)
    attends, has_mlp = not attention.flag("no_op", False), not mlp.flag("no_op", False)
    group = attention.integer("n_heads_in_group", high=heads) if attends else heads
    if heads % group:
        raise attention.wrong("n_heads_in_group", f"a divisor of num_attention_heads ({heads})")
    width = _nas_width(config, mlp.number("ffn_mult", high=1e4)) if has_mlp else 1
    own = None if has_mlp else "mixer" if attends else "empty"
    return LayerShape(heads, heads // group, width, own)


def _nas_width(config: JsonObject, multiplier: float) -> int:
    """Return 2/3 * multiplier * hidden size, rounded up to a multiple of 256."""
    size = int(2 * multiplier * config.integer("hidden_size", high=MAX_WIDTH) / 3)
    return -(-size // 256) * 256


def _openelm_widths(config: JsonObject) -> list[int]:
    """Return multiplier * hidden size, rounded to the nearest multiple of the divisor, but at least 90 % of it."""
    size = config.integer("hidden_size", high=MAX_WIDTH)
    divisor = config.integer("ffn_dim_divisor", 256, high=MAX_WIDTH)
    widths = []
    for multiplier in _per_layer(config, "ffn_multipliers"):
        width = max(divisor, int(multiplier * size + divisor / 2) // divisor * divisor)
        widths.append(width if width >= 0.9 * multiplier * size else width + divisor)
    return widths


def _of_layers(config: JsonObject, key: str) -> list[int]:
    """Return the number of heads of each layer."""
    numbers = _per_layer(config, key)
    if not all(number.is_integer() and 1 <= number <= MAX_HEADS for number in numbers):
        raise config.wrong(key, f"a list of integers in [1, {MAX_HEADS}]")
    return [int(number) for number in numbers]


def _per_layer(config: JsonObject, key: str) -> tuple[float, ...]:
    numbers = config.numbers(key)
    if len(numbers) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong(key, "a list with a number for each layer")
    return numbers


def _check(config: JsonObject, key: str, shapes: tuple[LayerShape, ...]) -> None:
    """Check that in each layer the key-value heads, read from this key, divide the query heads."""
    for layer, shape in enumerate(shapes):
        if shape.num_heads % shape.num_kv_heads:
            raise config.wrong(
                key,
                f"in layer {layer} a divisor of its query heads ({shape.num_heads}), not {shape.num_kv_heads}",
            )


def _largest(shapes: tuple[LayerShape, ...]) -> dict[str, Any]:
    """Return the fields for all layers (maxima) and the shape of each."""
    return {
        "num_heads": max(shape.num_heads for shape in shapes),
        "num_kv_heads": max(shape.num_kv_heads for shape in shapes),
        "intermediate_size": max(shape.intermediate_size for shape in shapes),
        "layer_shapes": shapes,
    }
