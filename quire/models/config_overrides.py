# SPDX-License-Identifier: Apache-2.0
"""Merge of --hf-overrides into the values of a config.json.

Invariant: torch-free. Where the file, the overrides or both describe the rotary embedding under two keys
(`rope_scaling` and `rope_parameters`), one description remains, so that readers of families meet one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TEXT = "text_config"
"""Key of the nested config of a wrapper's language model."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_LAYER_TYPES = (FULL, SLIDING, CHUNKED)
_SCALING, _PARAMETERS = "rope_scaling", "rope_parameters"
_INHERITED = ("rope_theta", "partial_rotary_factor")
"""Settings of a rope object that config.json may have beside it."""


def with_overrides(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with overrides applied to top-level keys and to keys of a nested language model.

    As in transformers, a non-empty `rope_scaling` decides the kind of the rotary embedding over `rope_parameters`; an
    override of either replaces both. Theta is kept from whichever has one.
    """
    merged = {**values, **overrides}
    text, text_overrides = values.get(TEXT), overrides.get(TEXT, {})
    if isinstance(text, dict) and isinstance(text_overrides, dict):
        merged[TEXT] = with_overrides(text, text_overrides)
    ropes = [source.get(key) for source in (overrides, values) for key in (_SCALING, _PARAMETERS)]
    if not all(rope is None or isinstance(rope, dict) for rope in ropes):
        return merged  # the reader of the config names the malformed value
    return _with_one_rope(values, overrides, merged)


def is_per_layer_type(rope: Mapping[str, Any]) -> bool:
    """Return whether a rope object has an object for each layer type."""
    return any(kind in rope for kind in _LAYER_TYPES)


def _with_one_rope(
    values: dict[str, Any], overrides: Mapping[str, Any], merged: dict[str, Any]
) -> dict[str, Any]:
    replaced = {key: overrides[key] or {} for key in (_SCALING, _PARAMETERS) if key in overrides}
    stored = {key: values.get(key) or {} for key in (_SCALING, _PARAMETERS)}
    source = replaced or stored
    key = next((key for key in source if source[key]), None)
    if key is None and not any(stored.values()):
        return merged
    given = source.get(key or _SCALING, {})
    key, rope = _laid_over(given, stored.values(), key or _SCALING)
    types = [kind for kind in _LAYER_TYPES if isinstance(rope.get(kind), dict)] or [""]
    for setting in _INHERITED:
        previous = _part(rope, FULL).get(setting)
        for kind in types:
            own = _part(rope, kind)
            beside = (stored[_SCALING], {} if kind else values, stored[_PARAMETERS])
            found = [_part(each, kind).get(setting) for each in beside]
            is_overridden = setting in overrides and (not replaced or _part(given, kind).get(setting) is None)
            if is_overridden and (kind in ("", FULL) or own.get(setting) == previous):
                own[setting] = overrides[setting]
            elif own.get(setting) is None and any(each is not None for each in found):
                own[setting] = next(each for each in found if each is not None)
    others = {name: value for name, value in merged.items() if name not in stored}
    return {**others, key: rope}


def _laid_over(
    given: dict[str, Any], stored: Iterable[dict[str, Any]], key: str
) -> tuple[str, dict[str, Any]]:
    """Return a copy of a rope object and its key; one for all layers is merged into that of full attention, if any.

    `given` without any key means no scaling.
    """
    if is_per_layer_type(given):
        return key, {kind: dict(own) if isinstance(own, dict) else own for kind, own in given.items()}
    rope = {"rope_type": given.get("type", "default"), **given}
    base = next((each for each in stored if is_per_layer_type(each)), None)
    if base is None:
        return key, rope
    kept = {kind: dict(own) if isinstance(own, dict) else own for kind, own in base.items()}
    return _PARAMETERS, {**kept, FULL: {**(kept.get(FULL) or {}), **rope}}


def _part(rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return what a rope object has for a layer type; "" is all layers, or full attention."""
    return (rope.get(kind or FULL) or {}) if is_per_layer_type(rope) else rope
