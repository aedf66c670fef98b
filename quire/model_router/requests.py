# SPDX-License-Identifier: Apache-2.0
"""Choice of a request's model: `?model=`, the body's `model` or `name`, or the default one.

Invariant: only the fields that decide are parsed; the body goes to the model's server unchanged, which reports what is
wrong with it.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from quire.errors import NotFoundError, ValidationError
from quire.model_router.models_file import ModelEntry, Models, parse_keep_alive

MAX_NAMES = 20  # Names of models in an error message.
OLLAMA_PROMPTS = {"/api/generate": "prompt", "/api/chat": "messages"}
_FALSE = ("false", "0")


class BodyFields(msgspec.Struct):
    """Fields of a request's body that the router reads."""

    model: Any = None
    name: Any = None
    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")


_DECODER = msgspec.json.Decoder(BodyFields)


@dataclass(frozen=True)
class Wanted:
    """A request's model and what it says about loading.

    Attributes:
        named: the name by which the request calls it.
        keep_alive_s: idle seconds until the model is unloaded after this request; None: not said.
        autoload: whether the request may load the model.
        unloads: whether it asks for nothing but to unload the model (Ollama).
    """

    entry: ModelEntry
    named: str
    keep_alive_s: float | None = None
    autoload: bool = True
    unloads: bool = False


def wanted_by(models: Models, path: str, query: QueryParams, body: bytes) -> Wanted:
    """Return the model of a request.

    Raises:
        NotFoundError: there is no such model.
        ValidationError: it names none, and there is no default; or `keep_alive` is malformed.
    """
    fields = _fields_of(body)
    named = query.get("model") or fields.model or fields.name
    if named is not None and not isinstance(named, str):
        raise ValidationError("model must be text", param="model")
    entry = entry_of(models, named)
    keep_alive_s = None
    if path.startswith("/api/") and fields.keep_alive is not None:
        keep_alive_s = parse_keep_alive(fields.keep_alive)
        if keep_alive_s is None:
            raise ValidationError('keep_alive must be seconds or text such as "5m"', param="keep_alive")
    prompt = OLLAMA_PROMPTS.get(path)
    is_empty = prompt is not None and bytes(getattr(fields, prompt)) in (b"null", b'""', b"[]")
    autoload = query.get("autoload", "true").lower() not in _FALSE
    return Wanted(entry, named or entry.name, keep_alive_s, autoload, is_empty and keep_alive_s == 0.0)


def entry_of(models: Models, named: str | None) -> ModelEntry:
    """Return the model of a name, or the default one.

    Raises:
        NotFoundError: there is no such model.
        ValidationError: no name is given, and there is no default.
    """
    if not named:
        if models.default is None:
            raise ValidationError(f"the request names no model; there are {_names(models)}", param="model")
        return models.entries[models.default]
    found = models.resolve(named)
    if found is None:
        raise NotFoundError(
            f"the model {named!r:.100} does not exist; there are {_names(models)}", param="model"
        )
    return models.entries[found]


def _names(models: Models) -> str:
    names = list(models.entries)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _fields_of(body: bytes) -> BodyFields:
    """Return the fields of a JSON object; those of another body are empty."""
    if not body:
        return BodyFields()
    try:
        return _DECODER.decode(body.removeprefix(codecs.BOM_UTF8))
    except msgspec.DecodeError:
        return BodyFields()
