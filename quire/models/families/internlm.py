"""InternLM (2023), InternLM 2 (Cai et al., 2024, arXiv:2403.17297) and InternLM 3 (2025)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import biases, read_llama, rms_eps
from quire.models.json_object import JsonObject

_INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "qkv_proj": "wqkv",
    "o_proj": "wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
    "down_proj": "w2",
    "lm_head": "output",
}


def read_internlm(architecture: str, config: JsonObject) -> ModelArch:
    """Llama, with biases around attention."""
    bias = config.flag("bias", True)
    return read_llama(architecture, config, **biases(qkv=bias, out=bias))


def read_internlm2(architecture: str, config: JsonObject) -> ModelArch:
    """Llama under other names; q, k and v come merged by key-value heads."""
    bias = config.flag("bias", True)
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_INTERNLM2_NAMES, {"gate_up_proj": ("w1", "w3")}),
        qkv_grouped=True,
        **biases(qkv=bias, out=bias),
    )


def read_internlm3(architecture: str, config: JsonObject) -> ModelArch:
    """Llama, with biases of q, k and v, and of the rest."""
    bias = config.flag("bias", False)
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        norm_eps=rms_eps(config, 1e-5),
        **biases(qkv=config.flag("qkv_bias", False), out=bias, mlp=bias),
    )
