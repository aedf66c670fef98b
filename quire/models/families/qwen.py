"""Qwen (Bai et al., 2023, arXiv:2309.16609), Qwen 2 (arXiv:2407.10671), Qwen 3 (arXiv:2505.09388), and MiMo."""

from __future__ import annotations

from dataclasses import replace

from quire.config.arch import CheckpointNames, ModelArch, MTPArch
from quire.models.families.fields import MAX_WIDTH, biases, either, read_llama, rms_eps, upper_window
from quire.models.json_object import JsonObject

_QWEN_KEYS = {
    "head_dim": "kv_channels",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
}
_QWEN_NAMES = {
    "model": "transformer",
    "embed_tokens": "wte",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "down_proj": "c_proj",
    "norm": "ln_f",
}
_MIMO_MTP = MTPArch(
    at="model.mtp_layers.0",
    names={
        "enorm": "{at}.token_layernorm",
        "hnorm": "{at}.hidden_layernorm",
        "eh_proj": "{at}.input_proj",
        "head_norm": "{at}.final_layernorm",
    },
    state_first=True,
    reads_sums=True,
)


def read_qwen(architecture: str, config: JsonObject) -> ModelArch:
    """Llama with biased q, k and v under other names; the file counts gate and up together.

    Beyond `seq_length` it would scale queries and the rotary base by the length of the prompt; contexts end there.
    """
    config.only("no_bias", True)
    config = either(config, _QWEN_KEYS)
    length = "seq_length" if "seq_length" in config else "max_position_embeddings"
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(
            _QWEN_NAMES, {"gate_up_proj": ("w2", "w1")}, (r"\.rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")
        ),
        intermediate_size=config.integer("intermediate_size", low=2, high=MAX_WIDTH) // 2,
        max_position_embeddings=config.integer(length),
        norm_eps=rms_eps(config, 1e-6),
        **biases(qkv=True),
    )


def read_qwen2(architecture: str, config: JsonObject) -> ModelArch:
    """Biased q, k and v; a window on the upper layers, off unless `use_sliding_window`."""
    return read_llama(architecture, config, **biases(qkv=True), **upper_window(config))


def read_mimo(architecture: str, config: JsonObject) -> ModelArch:
    """MiMo 7B (Xiaomi, 2025, arXiv:2505.07608): Qwen 2, and layers that guess."""
    arch = read_qwen2(architecture, config)
    names = replace(arch.names, unused=(*arch.names.unused, r"^model\.mtp_layers\."))
    return replace(arch, names=names, mtp=_MIMO_MTP)


def read_qwen3(architecture: str, config: JsonObject) -> ModelArch:
    """q and k are normed per head; a window as in Qwen 2."""
    return read_llama(architecture, config, default_head_dim=128, qk_norm="rms", **upper_window(config))
