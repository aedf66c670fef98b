# SPDX-License-Identifier: Apache-2.0
"""Encoding rules from the kinds of patterns by which configs name modules."""

from __future__ import annotations

import re
from typing import Literal

from quire.config.encoding import Encoding, EncodingRule
from quire.models.json_object import JsonObject

_ACTIVATIONS = (
    "activations are rounded as docs/quantized_checkpoints.md says, most often less than the checkpoint does"
)
_CACHE = "keys and values are kept as --kv-cache-dtype says; the checkpoint's scales are for that of its own kind alone"
_OTHERWISE = {
    "input_activations": _ACTIVATIONS,
    "activation_scheme": _ACTIVATIONS,
    "kv_cache_scheme": _CACHE,
    "kv_cache_quant_algo": _CACHE,
}
EVERYTHING = ".*"
HEAD = r"(.*\.)?lm_head"
"""Output head, which most methods leave in floats without saying so."""


def notes(config: JsonObject, *keys: str) -> tuple[str, ...]:
    """Return a sentence for each key present that says how activations, or keys and values, are rounded."""
    return tuple(
        f"{config.where}: {key}: {_OTHERWISE[key]}" for key in keys if config.get(key) not in (None, {})
    )


def cache_scales(config: JsonObject) -> Literal["int8", "e4m3"] | None:
    """Return the codes for which the files have scales of keys and values."""
    scheme = config.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return "e4m3" if scheme == "static" or config.get("kv_cache_quant_algo") == "FP8" else None
    said = config.child("kv_cache_scheme")
    if said.integer("num_bits", 8) != 8 or said.get("dynamic") not in (False, None):
        return None
    if said.text("type", "int") == "float":
        return "e4m3"
    return "int8" if said.flag("symmetric", True) else None


def names(config: JsonObject, *keys: str) -> tuple[str, ...]:
    """Return the first list of names present, or none."""
    return next((config.texts(key) for key in keys if key in config), ())


def skipping(config: JsonObject, *keys: str) -> list[EncodingRule]:
    """Return rules that leave modules in floats, by the first list of names present.

    As in transformers, a name is the beginning of a module's name up to a dot, as a regular expression, or its end.
    The tensors of a checkpoint take precedence; see `CheckpointQuantization`.
    """
    rules = []
    for name in names(config, *keys):
        try:
            start = re.compile(f"(?:{name})").pattern
        except re.error:
            start = re.escape(name)
        rules.append(EncodingRule(rf"{start}(?:(?<=\.)|(?=\.|$)).*|.*{re.escape(name)}", None))
    return rules


def beginning(config: JsonObject, key: str, pattern: str) -> str:
    """Return the pattern of names that begin with a match of a regular expression.

    Raises:
        ModelLoadError: it is not a regular expression.
    """
    return f"{whole(config, key, pattern)}.*"


def whole(config: JsonObject, key: str, pattern: str) -> str:
    """Return the pattern of names that match a regular expression; raises as `beginning` does."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise config.wrong(key, f"regular expressions; {pattern!r} is none: {error}") from error
    return f"(?:{pattern})"


def all_but_head(encoding: Encoding) -> list[EncodingRule]:
    """Return rules for every linear layer but the output head."""
    return [EncodingRule(HEAD, None), EncodingRule(EVERYTHING, encoding)]


def block_shape(config: JsonObject, key: str) -> tuple[int, int]:
    """Return outputs and inputs of a block.

    Raises:
        ModelLoadError: they are not two positive integers.
    """
    sides = [int(side) for side in config.numbers(key) if side == int(side) > 0]
    if len(sides) != 2 or len(config.numbers(key)) != 2:
        raise config.wrong(key, "two positive integers, outputs and inputs")
    return sides[0], sides[1]
