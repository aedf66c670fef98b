"""RWKV-7 "Goose" (B. Peng et al., 2025, arXiv:2503.14456), with the names of flash-linear-attention's checkpoints."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch, RWKV7Arch
from quire.models.families.fields import MAX_LAYERS, MAX_WIDTH, layer_norm, read_arch
from quire.models.families.mamba import POSITIONS
from quire.models.json_object import JsonObject

_LORAS = {
    f"{name}_{end}": f"{name}_lora.lora.{place}"
    for name in ("w", "v", "a", "g")
    for end, place in (("down", 0), ("up", 2))
}
_NAMES = CheckpointNames(
    {
        "embed_tokens": "embeddings",
        "embed_norm": "layers.0.pre_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **_LORAS,
    },
    merged={},
)


def read_rwkv7(architecture: str, config: JsonObject) -> ModelArch:
    """Layers that keep a state and nothing else; heads may be told by their number or by their size."""
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    config.only("attn")
    config.only("hidden_act", "sqrelu")
    config.only("value_dim", hidden, [hidden] * layers)
    return read_arch(
        architecture,
        config,
        names=_NAMES,
        intermediate_size=_width(config, hidden),
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        layer_types=("rwkv7",) * layers,
        max_position_embeddings=config.integer("max_position_embeddings", POSITIONS),
        embedding_norm=config.flag("norm_first", True),
        norm_bias=config.flag("norm_bias", True),
        rwkv7=RWKV7Arch(
            head_dim=_head_dim(config, hidden),
            decay_rank=config.integer("decay_low_rank_dim", high=MAX_WIDTH),
            value_rank=config.integer("v_low_rank_dim", high=MAX_WIDTH),
            rate_rank=config.integer("a_low_rank_dim", high=MAX_WIDTH),
            gate_rank=config.integer("gate_low_rank_dim", high=MAX_WIDTH),
        ),
        **layer_norm(config, "norm_eps"),
    )


def _head_dim(config: JsonObject, hidden: int) -> int:
    size = config.optional_integer("head_dim", high=hidden)
    if size is None:
        heads = config.integer("num_heads", max(1, hidden // 64), high=hidden)
        size = hidden // heads if hidden % heads == 0 else hidden + 1
    if hidden % size:
        raise config.wrong("hidden_size", "a multiple of the size of heads")
    return size


def _width(config: JsonObject, hidden: int) -> int:
    """Of what is between the two matrices of an MLP: a multiple of 32, if the file does not say."""
    given = config.optional_integer("intermediate_size", high=MAX_WIDTH)
    return given or -(-int(hidden * config.number("hidden_ratio", 4.0, high=1e4)) // 32) * 32
