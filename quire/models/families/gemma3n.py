"""Gemma 3n's text model (Google, 2025): what is Gemma 3's, and what widens its residual stream."""

from __future__ import annotations

from quire.config.arch import AlternatingArch, CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    alternating_window,
    optional_number,
)
from quire.models.families.gemma import read_gemma3
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL

_PERIOD, _WINDOW = 5, 512
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def read_gemma3n(architecture: str, config: JsonObject) -> ModelArch:
    """Norms are stored as they are; values are normed, too; the last layers have no keys and values of their own."""
    config.only("altup_active_idx", 0)
    config.only("altup_correct_scale", True)
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    shared = _shared_kv(config, num_layers)
    return read_gemma3(
        architecture,
        _with_one_size(config, num_layers),
        period=_PERIOD,
        window=_WINDOW,
        names=CheckpointNames({"token_rows": ""}, unused=tuple(_unused_of(layer) for layer in shared)),
        norm_offset=0.0,
        attention_scale=1.0,
        v_norm=True,
        final_logit_softcap=optional_number(config, "final_logit_softcapping", 30.0),
        shared_kv=shared,
        alternating=AlternatingArch(
            streams=config.integer("altup_num_inputs", 4, low=2, high=64),
            laurel_rank=config.integer("laurel_rank", 64, high=MAX_WIDTH),
            token_vocab=config.integer("vocab_size_per_layer_input", 262144, high=MAX_VOCAB),
            token_size=config.integer("hidden_size_per_layer_input", 256, high=MAX_WIDTH),
            sparsity=_sparsity(config, num_layers),
        ),
    )


def _with_one_size(config: JsonObject, num_layers: int) -> JsonObject:
    """MLPs may be listed layer by layer, but are all of one size here."""
    sizes = config.get("intermediate_size")
    if not isinstance(sizes, list) or not sizes:
        return config
    config.only("intermediate_size", [sizes[0]] * num_layers)
    return config.with_values(intermediate_size=sizes[0])


def _shared_kv(config: JsonObject, num_layers: int) -> dict[int, int]:
    """The last layers read what the last layer of their kind before them has."""
    shared = config.integer("num_kv_shared_layers", 15, low=0, high=num_layers - 1)
    kinds = alternating_window(config, period=_PERIOD, default=_WINDOW).get(
        "layer_types", (FULL,) * num_layers
    )
    own = num_layers - shared
    latest = {kind: layer for layer, kind in enumerate(kinds[:own])}
    if not latest.keys() >= set(kinds):
        raise config.wrong("num_kv_shared_layers", "such that a layer of each kind has keys and values")
    return {layer: latest[kinds[layer]] for layer in range(own, num_layers)}


def _unused_of(layer: int) -> str:
    return rf"\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\."


def _sparsity(config: JsonObject, num_layers: int) -> tuple[float, ...]:
    """By layer; most of the first ten, in a model that has more."""
    if "activation_sparsity_pattern" not in config:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (num_layers - sparse)
    shares = config.numbers("activation_sparsity_pattern")
    if len(shares) != num_layers or not all(0.0 <= share < 1.0 for share in shares):
        raise config.wrong("activation_sparsity_pattern", "num_hidden_layers numbers in [0, 1)")
    return shares
