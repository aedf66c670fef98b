"""Ollama's `options`: which of them chat knows, which have no effect here, and which are refused.

Invariant: an option comes under the name that chat knows, or is named as ignored because it concerns how a model is
loaded, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.entrypoints.openai.field_policy import Refused
from quire.entrypoints.openai.protocol.shapes import any_of, array, enum, optional

Fields = dict[str, Any]
NUMBER, INTEGER, TEXT = {"type": "number"}, {"type": "integer"}, {"type": "string"}
OPTIONS = {
    "temperature": ("temperature", NUMBER),
    "top_k": ("top_k", INTEGER),
    "top_p": ("top_p", NUMBER),
    "min_p": ("min_p", NUMBER),
    "seed": ("seed", INTEGER),
    "stop": ("stop", any_of(TEXT, array(TEXT))),
    "repeat_penalty": ("repetition_penalty", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "frequency_penalty": ("frequency_penalty", NUMBER),
}
"""Ollama's names of sampling options, to chat's and their schemas."""
CHAT_NAMES = {chat: f"options.{name}" for name, (chat, _) in OPTIONS.items()} | {
    "max_tokens": "options.num_predict"
}
NO_LIMIT = (-1, -2)
"""Values of `num_predict`: to the end of the answer, to that of the context."""
LOADING = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only",
    }
)  # fmt: skip
"""Options that concern how a model is loaded and how long a conversation may be: the server's business here."""
ONLY_WITH_MIROSTAT = frozenset({"mirostat_tau", "mirostat_eta"})
IGNORED = LOADING | ONLY_WITH_MIROSTAT
NEUTRAL: Mapping[str, Any] = {
    "mirostat": 0, "tfs_z": 1, "typical_p": 1, "penalize_newline": True, "repeat_last_n": -1,
}  # fmt: skip
"""Options that are not supported, with the value that asks for nothing: our penalties look at the whole context, -1."""
OPTIONS_OBJECT: Fields = {
    "type": "object",
    "properties": {
        **{name: optional(schema) for name, (_, schema) in OPTIONS.items()},
        "num_predict": any_of(enum(*NO_LIMIT), INTEGER, {"type": "null"}),
        **{name: {} for name in sorted(IGNORED)},
        **{name: enum(value, None) for name, value in NEUTRAL.items()},
    },
    "additionalProperties": {"type": "null"},
}
"""The schema of all of them."""
IDLE_OPTIONS_OBJECT: Fields = {
    **OPTIONS_OBJECT,
    "properties": {**OPTIONS_OBJECT["properties"], **{name: {} for name in (*OPTIONS, "num_predict")}},
}
"""That of a request which generates nothing: they change nothing, whatever they are."""


def ignored_options(options: Fields | None) -> list[str]:
    """Names of the options that were sent and change nothing."""
    return [f"options.{name}" for name in options or {} if name in IGNORED]


def sampling_fields(options: Fields) -> Fields:
    """Chat's fields for these options.

    Raises:
        ValidationError: an option cannot be honoured.
    """
    fields: Fields = {}
    for name, value in options.items():
        if value is None or name in IGNORED:
            continue
        if name == "num_predict":
            fields |= {} if value in NO_LIMIT else {"max_tokens": value}
        elif name in OPTIONS:
            fields[OPTIONS[name][0]] = value
        else:
            neutral = (NEUTRAL[name],) if name in NEUTRAL else ()
            Refused(neutral).check(f"options.{name:.64}", value)
    return fields
