# SPDX-License-Identifier: Apache-2.0
"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118), Gemma 3 text (arXiv:2503.19786), Gemma 3n and Gemma 4 text
(Google, 2025 and 2026) and RecurrentGemma (A. Botev et al., 2024, arXiv:2404.07839), a Griffin (arXiv:2402.19427).

Scaled embeddings, norm weights stored minus one, GELU. From Gemma 2 on, norms before and after each block, a query
scale of their own and windows on some layers; Gemma 2 soft-caps scores and logits; Gemma 3 norms q and k and gives
windowed layers their own rotary embedding; 3n widens the residual stream; 4 has larger heads in layers without window.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from quire.config.arch import (
    QKV_APART,
    AlternatingArch,
    CheckpointNames,
    ExpertsArch,
    ExpertStack,
    LayerShape,
    ModelArch,
    RecurrentUnitArch,
    RopeScaling,
    Routing,
    TokenRowsArch,
    TokenTableArch,
)
from quire.models.families.fields import (
    GATED_ACTIVATIONS,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    alternating_window,
    biases,
    either,
    optional_number,
    read_kv_heads,
    read_llama,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

_NAMES = CheckpointNames(
    {
        "self_attn": "temporal_block",
        "recurrent_unit": "temporal_block",
        "mlp": "mlp_block",
        "input_layernorm": "temporal_pre_norm",
        "post_attention_layernorm": "channel_pre_norm",
        "norm": "final_norm",
    },
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "linear_yx": ("linear_y", "linear_x"),
    },
)
_KINDS = {"recurrent": "recurrent_unit", "attention": SLIDING}
_MAX_TAPS = 64


def read_recurrent_gemma(architecture: str, config: JsonObject) -> ModelArch:
    """RecurrentGemma: two recurrent layers, then one of local attention, and so on; the rest is Gemma's."""
    config = either(config, {"attention_window_size": "sliding_window"})
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    head_dim = hidden_size // heads
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        intermediate_size=config.integer("intermediate_size", low=2, high=MAX_WIDTH) // 2,
        hidden_act=config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
        norm_offset=1.0,
        embedding_multiplier=_bfloat16(hidden_size**0.5),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        max_position_embeddings=config.integer("max_position_embeddings", 8192),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        sliding_window=config.integer("attention_window_size", 2048),
        layer_types=_layer_types(config),
        recurrent_unit=_read_unit(config, hidden_size, heads),
        final_logit_softcap=optional_number(config, "logits_soft_cap", 30.0),
        **biases(qkv=config.flag("attention_bias", False), out=True, mlp=True),
    )


def _layer_types(config: JsonObject) -> tuple[str, ...]:
    words = (
        config.texts("block_types") if "block_types" in config else ("recurrent", "recurrent", "attention")
    )
    if not words or not set(words) <= _KINDS.keys():
        raise config.unsupported("block_types", f"a list of {' and '.join(_KINDS)}")
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return tuple(_KINDS[words[layer % len(words)]] for layer in range(num_layers))


def _read_unit(config: JsonObject, hidden_size: int, heads: int) -> RecurrentUnitArch:
    width = config.integer("lru_width", hidden_size, high=MAX_WIDTH)
    if width % heads:
        raise config.wrong("lru_width", f"a multiple of num_attention_heads ({heads})")
    return RecurrentUnitArch(width, heads, config.integer("conv1d_width", 4, low=2, high=_MAX_TAPS))


def _bfloat16(value: float) -> float:
    """Round to bfloat16, ties to even, as the scale of its embeddings is."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[
        0
    ]
    return rounded


def read_gemma(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """One norm before each block, as in Llama; its early checkpoints say "gelu" and mean the tanh form."""
    config.get("hidden_act")
    fields = {
        "default_head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_offset": 1.0,
        "embedding_multiplier": config.integer("hidden_size", high=MAX_WIDTH) ** 0.5,
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }
    return read_llama(architecture, config, **(fields | differing))


def read_gemma2(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Soft caps, and a window on every other layer."""
    fields = {
        "block": "sandwich",
        "hidden_act": config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
        "attention_scale": config.number("query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5,
        "attn_logit_softcap": optional_number(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcap": optional_number(config, "final_logit_softcapping", 30.0),
    }
    windows = {} if "layer_types" in differing else alternating_window(config, period=2)
    return read_gemma(architecture, config, **(fields | windows | differing))


def read_vaultgemma(architecture: str, config: JsonObject) -> ModelArch:
    """VaultGemma (2025, arXiv:2510.15001): Gemma 2 with the norms before attention and MLP only."""
    names = CheckpointNames({"post_attention_layernorm": "pre_feedforward_layernorm"})
    return read_gemma2(architecture, config, block="sequential", names=names)


def read_gemma3(
    architecture: str, config: JsonObject, *, period: int = 6, window: int = 4096, **differing: Any
) -> ModelArch:
    """No soft caps; q and k are normed, and windowed layers (five of six) have their own rope.

    `period` and `window` are defaults. EmbeddingGemma (Schechter Vera et al., 2025, arXiv:2509.20354) is bidirectional;
    its window is the width of both sides.
    """
    period = config.integer("sliding_window_pattern", period, high=MAX_LAYERS)
    head_dim = config.integer("head_dim", 256, high=MAX_WIDTH)
    local = config.with_values(rope_theta=None, rope_scaling=None)
    local_theta = config.number("rope_local_base_freq", 10000.0, low=1.0)
    windows = alternating_window(config, period=period, default=window)
    bidirectional = config.flag("use_bidirectional_attention", False)
    if bidirectional and windows:
        windows["sliding_window"] = windows["sliding_window"] // 2 + 1
    fields = {
        "qk_norm": "rms",
        "attn_logit_softcap": optional_number(config, "attn_logit_softcapping", None),
        "final_logit_softcap": optional_number(config, "final_logit_softcapping", None),
        "rope": read_rope(config, head_dim=head_dim, theta=1e6),
        "rope_local": read_rope(local, head_dim=head_dim, theta=local_theta, layer_type=SLIDING),
        "bidirectional": bidirectional,
        **windows,
    }
    return read_gemma2(architecture, config, **(fields | differing))


_PERIOD, _WINDOW = 5, 512
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
_ROWS = ("token_rows", "token_row")  # Modules of per-layer token embeddings, which checkpoints do not name.


def read_gemma3n(architecture: str, config: JsonObject) -> ModelArch:
    """Norm weights stored as they are; values are normed, too; the last layers reuse earlier keys and values."""
    config.only("altup_active_idx", 0)
    config.only("altup_correct_scale", True)
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    windows = alternating_window(config, period=_PERIOD, default=_WINDOW)
    kinds = windows.get("layer_types", (FULL,) * num_layers)
    shared = _shared_kv(config, kinds, usual=15)
    return read_gemma3(
        architecture,
        _with_one_size(config, num_layers),
        period=_PERIOD,
        window=_WINDOW,
        names=CheckpointNames(
            dict.fromkeys((*_ROWS, "token_tables"), ""), unused=tuple(_unused_of(layer) for layer in shared)
        ),
        norm_offset=0.0,
        attention_scale=1.0,
        v_norm=True,
        final_logit_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        shared_kv=shared,
        token_rows=TokenRowsArch(
            vocab=config.integer("vocab_size_per_layer_input", 262144, high=MAX_VOCAB),
            size=config.integer("hidden_size_per_layer_input", 256, high=MAX_WIDTH),
            media_token=None,
        ),
        token_tables=_token_tables(config),
        alternating=AlternatingArch(
            streams=config.integer("altup_num_inputs", 4, low=2, high=64),
            laurel_rank=config.integer("laurel_rank", 64, high=MAX_WIDTH),
            sparsity=_sparsity(config, num_layers),
        ),
    )


_TABLES = {"vision": (262144, 2048), "audio": (262272, 1536)}
"""Kind of media -> first token and size of its table, where the part's config lacks them."""
_TABLE_TOKENS = 128


def _token_tables(config: JsonObject) -> tuple[TokenTableArch, ...]:
    """Return the tables of the model's other parts, which stand beside the language model's keys."""
    found = []
    for kind, (first, size) in _TABLES.items():
        if f"{kind}_config" not in config:
            continue
        part = config.child(f"{kind}_config")
        table = TokenTableArch(
            f"embed_{kind}",
            part.integer("vocab_offset", first, high=MAX_VOCAB),
            part.integer("vocab_size", _TABLE_TOKENS, high=MAX_VOCAB),
            part.integer("hidden_size", size, high=MAX_WIDTH),
            part.number("rms_norm_eps", 1e-6),
        )
        found.append(table)
    return tuple(found)


def _with_one_size(config: JsonObject, num_layers: int) -> JsonObject:
    """Return the config with a single MLP size; a per-layer list must have equal entries."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list) or not sizes:
        return config
    config.only("intermediate_size", [sizes[0]] * num_layers)
    return config.with_values(intermediate_size=sizes[0])


def _shared_kv(config: JsonObject, kinds: Sequence[str], *, usual: int) -> dict[int, int]:
    """Return reader -> source for the last layers, which read the cache of the last layer of their kind before them."""
    num_layers = len(kinds)
    own = num_layers - config.integer("num_kv_shared_layers", usual, low=0, high=num_layers - 1)
    latest = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if not latest.keys() >= set(kinds):
        raise config.wrong("num_kv_shared_layers", "such that a layer of each kind has keys and values")
    return {layer: latest[kinds[layer]] for layer in range(own, num_layers)}


def _unused_of(layer: int) -> str:
    return rf"\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."


def _sparsity(config: JsonObject, num_layers: int) -> tuple[float, ...]:
    """Return the sparsity of each layer; by default of the first ten, in a model that has more."""
    if "activation_sparsity_pattern" not in config:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (num_layers - sparse)
    shares = config.numbers("activation_sparsity_pattern")
    if len(shares) != num_layers or not all(0.0 <= share < 1.0 for share in shares):
        raise config.wrong("activation_sparsity_pattern", "num_hidden_layers numbers in [0, 1)")
    return shares


_GEMMA4_PERIOD = 6
_GEMMA4_MERGED = {**QKV_APART, "gate_up_proj": ("gate_proj", "up_proj")}


def read_gemma4(architecture: str, config: JsonObject) -> ModelArch:
    """Layers without window have heads, and perhaps key-value heads, of a size of their own; of these heads a part is
    rotated, and keys may serve as values.
    """
    ahead = config.get("use_bidirectional_attention")
    if ahead not in (None, False, "vision"):
        raise config.unsupported("use_bidirectional_attention", 'null or "vision"')
    windows = _gemma4_windows(config)
    kinds = windows["layer_types"]
    shared = _shared_kv(config, kinds, usual=0)
    keys_as_values = config.flag("attention_k_eq_v", False)
    shapes = _gemma4_shapes(config, kinds, shared)
    full = shapes[kinds.index(FULL)].head_dim
    merged = dict(_GEMMA4_MERGED)
    if keys_as_values:
        own = (layer for layer, kind in enumerate(kinds) if kind == FULL and layer not in shared)
        merged |= {f"{layer}.self_attn.qkv_proj": ("q_proj", "k_proj") for layer in own}
    unused = tuple(_unused_of(layer) for layer in shared)
    return read_gemma2(
        architecture,
        config,
        names=CheckpointNames(dict.fromkeys((*_ROWS, "beside"), ""), merged, unused),
        norm_offset=0.0,
        attention_scale=1.0,
        attn_logit_softcap=None,
        final_logit_softcap=optional_number(config, "final_logit_softcapping", None),
        qk_norm="rms",
        v_norm=True,
        head_dim=max(shape.head_dim or 1 for shape in shapes),
        num_kv_heads=max(shape.num_kv_heads for shape in shapes),
        intermediate_size=max(shape.intermediate_size for shape in shapes),
        layer_shapes=shapes,
        rope=_gemma4_rope(config, FULL, full or 1, 1e6),
        rope_local=_gemma4_rope(config, SLIDING, config.integer("head_dim", 256), 1e4),
        shared_kv=shared,
        token_rows=_token_rows(config),
        keys_as_values=keys_as_values,
        full_layers_causal=ahead == "vision",
        experts=_gemma4_experts(config, len(kinds)),
        **windows,
    )


def _gemma4_windows(config: JsonObject) -> dict[str, Any]:
    """Return the fields of windows on five of six layers, or those listed; the last layer never has one."""
    windows = alternating_window(config, period=_GEMMA4_PERIOD, default=_WINDOW)
    kinds = windows.get("layer_types", (FULL,) * config.integer("num_hidden_layers", high=MAX_LAYERS))
    return windows | {"layer_types": (*kinds[:-1], FULL)}


def _gemma4_shapes(
    config: JsonObject, kinds: Sequence[str], shared: dict[int, int]
) -> tuple[LayerShape, ...]:
    """Return each layer's sizes: overrides by layer in late files, by keys for all layers without window in others."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads, head_dim = read_kv_heads(config, heads), config.integer("head_dim", 256, high=MAX_WIDTH)
    inner = config.integer("intermediate_size", high=MAX_WIDTH)
    wide = config.flag("use_double_wide_mlp", False)
    of_full = {"head_dim": config.integer("global_head_dim", 512, high=MAX_WIDTH)}
    if config.flag("attention_k_eq_v", False):
        of_full["num_key_value_heads"] = (
            config.optional_integer("num_global_key_value_heads", high=MAX_HEADS) or kv_heads
        )
    by_layer = config.child("per_layer_config") if "per_layer_config" in config else None
    shapes = []
    for layer, kind in enumerate(kinds):
        usual = of_full if kind == FULL and by_layer is None else {}
        usual = {"head_dim": head_dim, "num_key_value_heads": kv_heads} | usual
        own = JsonObject(config.where, usual)
        if by_layer is not None:
            own = by_layer.child(str(layer))
            own = own.with_values(**(usual | dict(own.values)))
        shapes.append(
            LayerShape(
                heads,
                read_kv_heads(own, heads),
                inner * (2 if wide and layer in shared else 1),
                head_dim=own.integer("head_dim", high=MAX_WIDTH),
            )
        )
    for kind in set(kinds):
        if len({shape.head_dim for shape, one in zip(shapes, kinds, strict=True) if one == kind}) > 1:
            raise config.unsupported(
                "per_layer_config", f"such that all layers of kind {kind} have one head_dim"
            )
    return tuple(shapes)


def _gemma4_rope(config: JsonObject, kind: str, head_dim: int, theta: float) -> RopeScaling:
    usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25} if kind == FULL else {}
    if "rope_parameters" not in config:
        config = config.with_values(rope_parameters={kind: {"rope_theta": theta} | usual})
    return read_rope(config, head_dim=head_dim, theta=theta, layer_type=kind)


def _token_rows(config: JsonObject) -> TokenRowsArch | None:
    size = config.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_WIDTH)
    vocab = config.integer("vocab_size_per_layer_input", 262144, high=MAX_VOCAB)
    media = config.optional_integer("pad_token_id", low=0, high=vocab - 1)
    return TokenRowsArch(vocab, size, media or 0) if size else None


def _gemma4_experts(config: JsonObject, num_layers: int) -> ExpertsArch | None:
    """Return the experts beside the MLP of every layer."""
    if not config.flag("enable_moe_block", False):
        for key in ("num_experts", "moe_intermediate_size", "top_k_experts"):
            config.get(key)  # read, and without effect
        return None
    count = config.integer("num_experts", high=MAX_EXPERTS)
    return ExpertsArch(
        count=count,
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        routing=Routing(config.integer("top_k_experts", high=count), normalized=True),
        layers=tuple(range(num_layers)),
        stack=ExpertStack(gate_up="gate_up_proj", weight=""),
        activation=config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
    )
