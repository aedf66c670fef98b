# SPDX-License-Identifier: Apache-2.0
"""Reader of the rotary embedding in config.json, in any of its layouts.

Invariant: torch-free; the result needs no further defaults. Layouts: `rope_theta` beside an optional `rope_scaling`
(older), one `rope_parameters` object, or one `rope_parameters` object per layer type (newer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.config.arch import RopeScaling
from quire.models.config_overrides import CHUNKED, FULL, SLIDING, is_per_layer_type
from quire.models.json_object import JsonObject

__all__ = ["CHUNKED", "FULL", "SLIDING", "layer_rope", "read_rope", "with_kind_renamed"]


def read_rope(
    config: JsonObject,
    *,
    head_dim: int,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str = FULL,
) -> RopeScaling:
    """Return the rotary embedding of one layer type; `theta` and `partial` are the family's defaults.

    Raises:
        ModelLoadError: a value is missing or malformed.
        UnsupportedModelError: the kind is not in `ROPE_KINDS`.
    """
    rope = layer_rope(config, layer_type)
    kind = rope.choice("rope_type" if "rope_type" in rope else "type", tuple(ROPE_KINDS), "default")
    partial = config.number("partial_rotary_factor", partial, low=1e-6, high=1.0)
    partial = rope.number("partial_rotary_factor", partial, low=1e-6, high=1.0)
    base = RopeScaling(
        kind=kind,
        theta=rope.number("rope_theta", config.number("rope_theta", theta, low=1.0), low=1.0),
        partial_rotary_factor=partial,
        interleaved=interleaved,
    )
    rot_dim = base.rotated(head_dim)
    if rot_dim < 2 or rot_dim % 2:
        raise config.unsupported(
            "partial_rotary_factor", f"such that an even part of head_dim {head_dim} is rotated"
        )
    for key in ("short_factor", "long_factor"):
        if key in rope and len(rope.numbers(key)) != rot_dim // 2:
            raise rope.wrong(key, f"a list of {rot_dim // 2} numbers, half of the rotated dimensions")
    return ROPE_KINDS[kind](base, rope, config)


def with_kind_renamed(config: JsonObject, names: Mapping[str, str]) -> JsonObject:
    """Return a copy with rope kinds renamed by `names`, for families that reused a name for another formula."""
    values = dict(config.values)
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(config.child(key).values)
        for kind_key in ("rope_type", "type"):
            if rope.get(kind_key) in names:
                rope[kind_key] = names[rope[kind_key]]
        if rope:
            values[key] = rope
    return config.with_values(**values)


def layer_rope(config: JsonObject, layer_type: str = FULL) -> JsonObject:
    """Return the object that describes the rotary embedding of the layers of one type."""
    if "rope_parameters" not in config:
        return config.child("rope_scaling")
    rope = config.child("rope_parameters")
    return rope.child(layer_type) if is_per_layer_type(rope.values) else rope


def _default(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    return base


def _factor(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    return replace(base, factor=rope.number("factor", low=1.0, high=1e6))


def _proportional(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    return replace(base, factor=rope.number("factor", 1.0, low=1.0, high=1e6))


def _llama3(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    scaled = replace(
        _factor(base, rope, config),
        original_max_position=_original_max_position(rope, config),
        low_freq_factor=rope.number("low_freq_factor", low=1e-6, high=1e6),
        high_freq_factor=rope.number("high_freq_factor", low=1e-6, high=1e6),
    )
    if scaled.high_freq_factor <= scaled.low_freq_factor:
        raise rope.wrong("high_freq_factor", f"greater than low_freq_factor ({scaled.low_freq_factor:g})")
    return scaled


def _yarn(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    scaled = _with_length_factor(base, rope, config)
    return replace(
        scaled,
        # Published checkpoints use zero for unset, as transformers does.
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _longrope(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    return replace(
        _with_length_factor(base, rope, config),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
    )


def _with_length_factor(base: RopeScaling, rope: JsonObject, config: JsonObject) -> RopeScaling:
    """Return `base` with `factor`, by default the ratio of the context to the original one, and `attention_factor`."""
    original = _original_max_position(rope, config)
    ratio = config.integer("max_position_embeddings") / original
    attention = rope.optional_number("attention_factor", low=1e-6, high=1e6)
    factor = rope.number("factor", max(ratio, 1.0), low=1.0, high=1e6)
    return replace(base, factor=factor, original_max_position=original, attention_factor=attention)


def _original_max_position(rope: JsonObject, config: JsonObject) -> int:
    """Return the original context; Phi-3 has it beside the rope object, and that one wins."""
    key = "original_max_position_embeddings"
    inner = rope.integer(key, config.integer("max_position_embeddings"), low=2)
    return config.integer(key, inner, low=2)


ROPE_KINDS: dict[str, Callable[[RopeScaling, JsonObject, JsonObject], RopeScaling]] = {
    "default": _default,
    "linear": _factor,
    "dynamic": _factor,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
