"""Solar Pro (Upstage, 2024): a Llama grown in depth, whose layers are skipped in part."""

from __future__ import annotations

from quire.config.arch import ModelArch, Skip
from quire.models.families.fields import MAX_LAYERS, read_llama
from quire.models.json_object import JsonObject

_SKIPS = (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4"))
"""Layers where skips of one kind start, and where they end."""


def read_solar(architecture: str, config: JsonObject) -> ModelArch:
    """A skip starts before the last of the layers that starts one of its kind, and so do others that end later.

    `sliding_window` is in the file, and no layer has one.
    """
    config.get("sliding_window")
    shares = config.numbers("bskcn_tv")
    if len(shares) != 2 or not all(0.0 <= share <= 1.0 for share in shares):
        raise config.wrong("bskcn_tv", "two numbers in [0, 1], for training and for what comes then")
    skips = [skip for starts, ends in _SKIPS for skip in _skips(config, starts, ends, shares[1])]
    return read_llama(architecture, config, skips=tuple(skips))


def _skips(config: JsonObject, starts: str, ends: str, share: float) -> list[Skip]:
    started, made = _layers(config, starts), []
    for end in _layers(config, ends):
        before = [start for start in started if start <= end]
        if not before:
            raise config.wrong(ends, f"layers at or behind the first of {starts}")
        made.append(Skip(max(before), end, share))
    return made


def _layers(config: JsonObject, key: str) -> list[int]:
    count = config.integer("num_hidden_layers", high=MAX_LAYERS)
    numbers = config.numbers(key)
    if not all(number.is_integer() and 0 <= number < count for number in numbers):
        raise config.wrong(key, f"a list of layers, 0 to {count - 1}")
    return [int(number) for number in numbers]
