# SPDX-License-Identifier: Apache-2.0
"""Reader of config.json for models that transformers runs, without importing transformers.

Invariant: torch-free. Whether a model can run is tested when it is built, by running it (`sites`, `rows`).
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quire.config.arch import ModelArch
from quire.errors import UnsupportedModelError
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, read_arch
from quire.models.json_object import JsonObject

_KEYS = {
    "hidden_size": ("n_embd", "d_model", "dim", "emb_dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads"),
    "max_position_embeddings": (
        "n_positions",
        "context_length",
        "max_seq_len",
        "max_sequence_length",
        "max_target_positions",
        "seq_length",
    ),
}
"""Usual key -> its names in other files."""

_PARTS = ("text_config", "audio_encoder", "audio_encoder_config", "patcher_config")
"""Keys of config.json in models with more than a language model."""

_DONE_BY_TRANSFORMERS = (
    "position_embedding_type",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "layer_norm_elementwise_affine",
    "per_layer_config",
)
"""Options that transformers' code implements and that do not change the mask."""


@cache
def transformers_has(architecture: str) -> bool:
    """Return whether the installed transformers defines a model of that name; does not import it."""
    found = find_spec("transformers")
    if found is None or not found.submodule_search_locations or not architecture.isidentifier():
        return False
    definition = re.compile(rf"^class {architecture}\(".encode(), re.MULTILINE)
    models = Path(found.submodule_search_locations[0]) / "models"
    return any(definition.search(file.read_bytes()) for file in models.glob("*/modeling_*.py"))


def read_transformers(architecture: str, config: JsonObject) -> ModelArch:
    """Read the sizes, by any of the usual names; the whole file is kept to be read again by transformers.

    The file's numbers of heads are for display: attention is inspected when the model is built.

    Raises:
        ModelLoadError: a size is missing or no number. transformers may have a default; give it with --hf-overrides.
        UnsupportedModelError: it is part of a multimodal model.
    """
    parts = [key for key in _PARTS if key in config]
    if parts:
        raise UnsupportedModelError(
            f"{config.where}: {parts[0]}: {architecture} is multimodal, or consists of several models; those supported "
            "are in docs/models.md"
        )
    config.only("use_bidirectional_attention", False, "vision")  # "vision": only for image tokens
    for key in _DONE_BY_TRANSFORMERS:
        config.get(key)
    sizes = config.with_aliases(_present(config))
    heads = sizes.integer("num_attention_heads", 1, high=MAX_HEADS)
    width = sizes.integer("hidden_size", high=MAX_WIDTH)
    return read_arch(
        architecture,
        sizes,
        intermediate_size=0,
        num_heads=heads,
        num_kv_heads=sizes.integer("num_key_value_heads", heads, high=MAX_HEADS),
        head_dim=sizes.integer("head_dim", max(1, width // heads), high=MAX_WIDTH),
        foreign_config=json.dumps(config.values),
    )


def _present(config: JsonObject) -> dict[str, str]:
    """Return the usual key -> the file's key, where it differs."""
    return {
        key: other
        for key, others in _KEYS.items()
        if key not in config
        for other in others
        if other in config.values
    }
