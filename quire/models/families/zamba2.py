"""Zamba 2 (Glorioso et al., 2024, arXiv:2411.15242): Mamba 2 in all layers, and before some a block that they share."""

from __future__ import annotations

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch, SharedBlocksArch
from quire.models.families.fields import GATED_ACTIVATIONS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, read_llama
from quire.models.families.mamba import read_heads
from quire.models.families.mamba_hybrids import STATE_NAMES
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_KEYS = {
    "num_heads": "n_mamba_heads",
    "head_dim": "",
    "n_groups": "mamba_ngroups",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "use_bias": "add_bias_linear",
    "hidden_act": "",
    "time_step_limit": "",
}
"""What Mamba's own files call otherwise, or what has another meaning here."""
_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
_NORM_EPS = 1e-5
"""Of the norms in Mamba, whatever that of others is."""


def read_zamba2(architecture: str, config: JsonObject) -> ModelArch:
    """Attention is twice as wide as hidden states, for it reads them beside the embeddings."""
    config.only("use_long_context", False)
    heads = config.integer("num_attention_heads", 32, high=MAX_HEADS)
    config.only("num_key_value_heads", heads)
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    head_dim, rest = divmod(2 * hidden, heads)
    if rest or head_dim % 2:
        raise config.wrong("num_attention_heads", f"such that each head has an even part of {2 * hidden}")
    shares = _shares(config)
    config = config.with_values(
        num_hidden_layers=len(shares), num_key_value_heads=heads, attention_bias=False
    )
    used = [layer for layer, has_block in enumerate(shares) if has_block]
    blocks = min(config.integer("num_mem_blocks", 1, high=MAX_LAYERS), len(used))
    rotated = config.flag("use_mem_rope", False)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(STATE_NAMES, QKV_APART, unused=tuple(map(_unused_of, used[blocks:]))),
        layer_types=tuple("attention_and_mamba2" if has_block else "mamba2" for has_block in shares),
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim) if rotated else None,
        intermediate_size=config.integer("intermediate_size", 4 * hidden, high=MAX_WIDTH),
        hidden_act=config.choice("hidden_act", GATED_ACTIVATIONS, "gelu"),
        mlp_bias=config.flag("add_bias_linear", False),
        max_position_embeddings=config.integer("max_position_embeddings", 4096),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        norm_eps=config.number("rms_norm_eps", 1e-5, high=1.0),
        mamba2=read_heads(
            config.with_aliases(_KEYS),
            norm_eps=_NORM_EPS,
            groups=1,
            states=64,
            time_limits=(config.number("time_step_min", 0.001), float("inf")),
        ),
        shared_blocks=SharedBlocksArch(
            layers=tuple(used),
            count=blocks,
            adapter_rank=config.integer("adapter_rank", 128, high=MAX_WIDTH),
            adapts_attention=config.flag("use_shared_attention_adapter", False),
        ),
    )


def _shares(config: JsonObject) -> tuple[bool, ...]:
    """Whether each layer has a shared block before it."""
    words = config.texts("layers_block_type")
    if not set(words) <= _KINDS.keys():
        raise config.unsupported("layers_block_type", f"a list of {', '.join(_KINDS)}")
    if not any(_KINDS[word] for word in words):
        raise config.unsupported("layers_block_type", "a list with a hybrid layer")
    return tuple(_KINDS[word] for word in words)


def _unused_of(layer: int) -> str:
    """Where a file has a shared block a second time."""
    return rf"\.layers\.{layer}\.shared_transf(ormer)?\."
