# SPDX-License-Identifier: Apache-2.0
"""Llama (Touvron et al., 2023, arXiv:2302.13971) and its closest relatives; `llama_like` has more."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.models.families.fields import (
    declared_windows,
    layer_norm,
    plain_mlp,
    read_llama,
    rms_eps,
    uniform_window,
    unrotated_layers,
)
from quire.models.json_object import JsonObject

__all__ = ["read_llama"]


def read_mistral(architecture: str, config: JsonObject) -> ModelArch:
    """Mistral (Jiang et al., 2023, arXiv:2310.06825): every layer has the window, if there is one."""
    return read_llama(architecture, config, **uniform_window(config, default=4096))


def read_ministral(architecture: str, config: JsonObject) -> ModelArch:
    """Ministral: a window on the layers that the file names, else on all."""
    return read_llama(architecture, config, **declared_windows(config, lambda layer: True))


def read_arcee(architecture: str, config: JsonObject) -> ModelArch:
    """Arcee's AFM: an MLP without a gate."""
    return read_llama(architecture, config, norm_eps=rms_eps(config, 1e-5), **plain_mlp(config, "relu2"))


def read_smollm3(architecture: str, config: JsonObject) -> ModelArch:
    """SmolLM 3: some layers have no positions."""
    config.only("use_sliding_window", False)
    return read_llama(
        architecture,
        config,
        theta=2e6,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        unrotated_layers=unrotated_layers(config),
    )


def read_seed_oss(architecture: str, config: JsonObject) -> ModelArch:
    """Seed-OSS: separate flags for biases of q, k and v and of the rest."""
    return read_llama(
        architecture,
        config,
        default_head_dim=128,
        attention_bias=config.flag("attention_bias", True),
        attention_out_bias=config.flag("attention_out_bias", False),
    )


def read_orion(architecture: str, config: JsonObject) -> ModelArch:
    """Orion (Chen et al., 2024, arXiv:2401.12246): layer norms."""
    return read_llama(architecture, config, **layer_norm(config, "rms_norm_eps", 1e-5))
