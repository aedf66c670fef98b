"""Phi-1 to Phi-2 (arXiv:2306.11644, arXiv:2309.05463), Phi-3 (arXiv:2404.14219) and Phi-4 (arXiv:2412.08905)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import (
    biases,
    layer_norm,
    plain_mlp,
    read_head_dim,
    read_llama,
    rms_eps,
    uniform_window,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope, with_kind_renamed

_PHI_NAMES = {
    "o_proj": "dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "fc1",
    "down_proj": "fc2",
    "norm": "final_layernorm",
}


def read_phi(architecture: str, config: JsonObject) -> ModelArch:
    """Attention and MLP side by side, half of each head rotated, biases everywhere, in the head too."""
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    return read_llama(
        architecture,
        config,
        names=CheckpointNames(_PHI_NAMES),
        block="parallel",
        head_dim=head_dim,
        rope=read_rope(config, head_dim=head_dim, partial=0.5),
        qk_norm="layer" if config.flag("qk_layernorm", False) else None,
        head_bias=True,
        **layer_norm(config),
        **plain_mlp(config, "gelu_new"),
        **biases(True),
    )


def read_phi3(architecture: str, config: JsonObject) -> ModelArch:
    """Merged weights; one window for all layers; its early checkpoints call longrope "su" or "yarn"."""
    return read_llama(
        architecture,
        with_kind_renamed(config, {"su": "longrope", "yarn": "longrope"}),
        names=CheckpointNames(merged={}),
        norm_eps=rms_eps(config, 1e-5),
        **uniform_window(config, default=None),
    )
