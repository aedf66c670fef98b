"""PLaMo 2 (Preferred Networks, 2025, arXiv:2509.04897)."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, HeadedMambaArch, ModelArch
from quire.models.families.experts import all_layers
from quire.models.families.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, biases, read_llama
from quire.models.families.mamba import MAX_STATES, MAX_TAPS
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING

_MAMBA = "headed_mamba"
_NAMES = CheckpointNames(
    {
        "layers": "layers.layers",
        "self_attn": "mixer",
        "mamba": "mixer",
        "q_norm": "q_weight",
        "k_norm": "k_weight",
        "x_proj": "bcdt_proj",
        "b_norm": "B_norm_weight",
        "c_norm": "C_norm_weight",
        "dt_norm": "dt_norm_weight",
        "scan": "",
        "input_layernorm": "pre_mixer_norm",
        "post_attention_layernorm": "post_mixer_norm",
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "post_feedforward_layernorm": "post_mlp_norm",
    },
    merged={},
)
_OFFSETS = {"post_attention_layernorm": 1 / 5, "post_feedforward_layernorm": 1 / 5**1.5}


def read_plamo2(architecture: str, config: JsonObject) -> ModelArch:
    """Mamba and attention in turn, each between two norms, as MLPs are; attention sees a window, in some layers all."""
    config.only("use_predefined_initial_state", False)
    return read_llama(
        architecture,
        config,
        names=_NAMES,
        block="sandwich",
        norm_offset=1.0,
        norm_offsets=_OFFSETS,
        head_dim=config.integer("hidden_size_per_head", 128, high=MAX_WIDTH),
        qk_norm="each_head_rms",
        layer_types=_layer_types(config),
        # A token sees so many before itself.
        sliding_window=config.integer("attention_window_size", 2048) + 1,
        headed_mamba=_read_mamba(config),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(False),
    )


def _layer_types(config: JsonObject) -> tuple[str, ...]:
    """One of so many layers attends, from the middle of the first few on; of a model of fewer layers the last."""
    layers = all_layers(config)
    every = config.integer("mamba_step", 2, low=2, high=MAX_LAYERS)
    first = min(every // 2, len(layers) - 1)
    wide = config.numbers("full_attention_idx") if "full_attention_idx" in config else ()
    if not config.flag("mamba_enabled", True):
        every, first = 1, 0
    return tuple(_MAMBA if layer % every != first else FULL if layer in wide else SLIDING for layer in layers)


def _read_mamba(config: JsonObject) -> HeadedMambaArch:
    return HeadedMambaArch(
        heads=config.integer("mamba_num_heads", 64, high=MAX_HEADS),
        head_dim=config.integer("hidden_size_per_head", 128, high=MAX_WIDTH),
        states=config.integer("mamba_d_state", 64, high=MAX_STATES),
        taps=config.integer("mamba_d_conv", 4, low=2, high=MAX_TAPS),
        rank=max(64, config.integer("hidden_size", high=MAX_WIDTH) // 16),
    )
