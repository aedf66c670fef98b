# SPDX-License-Identifier: Apache-2.0
"""Ollama's `options` as fields of a chat request.

Invariant: options follow the rules of all fields. Supported ones get chat's name, unsupported ones that would change
the answer are rejected, and others are named as ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.entrypoints.openai.field_rules import REFUSED_SAMPLERS
from quire.entrypoints.openai.protocol.requests import SAMPLERS
from quire.entrypoints.openai.protocol.shapes import any_of, array, enum, optional
from quire.entrypoints.openai.sampling import OTHER_SAMPLER_NAMES
from quire.sampling_params import INT_FIELDS

Fields = dict[str, Any]
BOOLEAN, NUMBER, INTEGER, TEXT = ({"type": name} for name in ("boolean", "number", "integer", "string"))
TEXTS = any_of(TEXT, array(TEXT))
_OTHER_SCHEMAS: Mapping[str, Fields] = {"temperature_last": BOOLEAN, "dry_sequence_breakers": array(TEXT)}
OPTIONS: Mapping[str, Fields] = {
    **{
        name: _OTHER_SCHEMAS.get(
            name, INTEGER if OTHER_SAMPLER_NAMES.get(name, name) in INT_FIELDS else NUMBER
        )
        for name in SAMPLERS
    },
    "stop": TEXTS,
}  # Schemas of sampling options, which are chat fields of the same name, llama.cpp's included.
CHAT_NAMES = {name: f"options.{name}" for name in OPTIONS} | {"max_tokens": "options.num_predict"}
NO_LIMIT = (-1, -2)  # Values of `num_predict`: until the end of the answer, or of the context.
LOADING = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
    }
)  # fmt: skip  # Options of loading and context size, which the server decides here.
OPTIONS_OBJECT: Fields = {
    "type": "object",
    "properties": {
        **{name: {} for name in sorted(LOADING)},
        **{name: enum(*rule.neutral, None) for name, rule in REFUSED_SAMPLERS.items()},
        **{name: optional(schema) for name, schema in OPTIONS.items()},
        "num_predict": any_of(enum(*NO_LIMIT), INTEGER, {"type": "null"}),
    },
}  # Schema of all options.
# Schema of a request that generates nothing: options have no effect.
IDLE_OPTIONS_OBJECT: Fields = {"type": "object"}


def ignored_options(options: Fields | None) -> list[str]:
    """Return the paths of the given options that have no effect."""
    return paths_of(
        name
        for name, value in (options or {}).items()
        if value is not None and name not in (*OPTIONS, "num_predict", *REFUSED_SAMPLERS)
    )


def paths_of(names: Iterable[str]) -> list[str]:
    return [f"options.{name}" for name in names]


def sampling_fields(options: Fields) -> Fields:
    """Return chat's fields for these options.

    Raises:
        ValidationError: an option is not supported.
    """
    fields: Fields = {}
    for name, value in options.items():
        if value is None:
            continue
        if name == "num_predict":
            fields |= {} if value in NO_LIMIT else {"max_tokens": _whole(value)}
        elif name in OPTIONS:
            fields[name] = _whole(value) if OPTIONS[name] is INTEGER else value
        elif name in REFUSED_SAMPLERS:
            REFUSED_SAMPLERS[name].check(f"options.{name}", value)
    return fields


def _whole(value: Any) -> Any:
    """Return a whole number as an integer: clients in languages with one number type send 20.0 for 20."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
