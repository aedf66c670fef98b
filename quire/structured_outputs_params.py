# SPDX-License-Identifier: Apache-2.0
"""`StructuredOutputsParams` with vLLM's names and meanings, and the keys of `--structured-outputs-config`.

Invariant: an instance holds exactly one constraint, of the right type; `normalize` and the backend decide whether it
can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from quire.errors import ValidationError

MiB = 2**20


class StructuredOutputsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `--structured-outputs-config`, named as in vLLM where it has them.

    Args:
        backend: "auto", or the name of a backend.
        disable_any_whitespace: JSON without whitespace, unless a request has a whitespace_pattern.
        disable_additional_properties: objects have only named properties, unless the schema sets additionalProperties.
        compile_timeout_s: most CPU seconds to compile one constraint.
        compile_memory_mb: most MiB to compile one constraint.
        cache_mb: MiB of cached compiled grammars.
        num_checkers: processes that check constraints concurrently.
        mask_time_ms: mean CPU time per step of a constrained text; see `MaskBudget`.
        jump_ahead: most tokens drafted where a grammar forces the text; None: by model size.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    compile_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    compile_memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 256
    cache_mb: Annotated[int, msgspec.Meta(ge=1)] = 256
    num_checkers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    mask_time_ms: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    jump_ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None


PARAM = "structured_outputs"
FAULT = f"{PARAM} cannot be enforced any further: "
"""Prefix of a failure reason where the request's constraint is at fault."""
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """One constraint and its options. None is absent.

    Args:
        json: a JSON schema, as an object or as JSON text; the output is a JSON value that it validates.
        regex: the whole text matches this expression.
        choice: the text is one of these.
        grammar: a context-free grammar in EBNF, either as Lark writes it or as llama.cpp's GBNF.
        json_object: true: the text is a JSON object.
        structural_tag: pieces of fixed and free text, schemas and expressions (see structured_output.md).
        disable_any_whitespace: JSON without whitespace between tokens.
        disable_additional_properties: objects have only named properties, unless the schema sets additionalProperties.
        whitespace_pattern: expression for the whitespace between JSON tokens.

    Raises:
        ValidationError: there is not exactly one constraint, or a value is of the wrong type; `param` names it.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValidationError(
                f"{PARAM} needs exactly one of {', '.join(CONSTRAINTS)}, got {', '.join(given) or 'none'}",
                param=PARAM,
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            self._check_text(name)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, "must be true or false")
        if self.json_object not in (None, True):
            raise invalid("json_object", "must be true; leave it out for free text")
        self._normalize()

    @property
    def kind(self) -> str:
        """Name of the constraint."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def json_value(self) -> Any:
        """Parsed schema; raises ValidationError if its text is not JSON."""
        try:
            return json.loads(str(self.json))
        except (ValueError, RecursionError) as error:
            raise invalid("json", f"is no valid JSON: {error}") from None

    @property
    def key(self) -> bytes:
        """Encoding, equal for equal parameters."""
        return msgspec.msgpack.encode(self)

    def _check_text(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str):
            raise invalid(name, f"must be text, got {type(value).__name__}")
        if not value and name == "grammar":
            raise invalid(name, "must not be empty")
        if "\0" in value:
            raise invalid(name, "must not hold the character NUL")

    def _normalize(self) -> None:
        """Store JSON as text, which is immutable and keeps the order of keys."""
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, dict | bool):
                msgspec.structs.force_setattr(self, name, _dumped(name, value))
            elif value is not None and (not isinstance(value, str) or not value):
                raise invalid(name, "must be a JSON object or its text")
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", _checked_choice(self.choice))


def structured_outputs_of(value: Any) -> StructuredOutputsParams:
    """Return parameters from an object with their names, as in a request; null is absent.

    Raises:
        ValidationError: see `StructuredOutputsParams`; or a name is unknown.
    """
    if not isinstance(value, dict):
        raise ValidationError(f"{PARAM} must be an object, got {type(value).__name__}", param=PARAM)
    unknown = next((name for name in value if name not in StructuredOutputsParams.__struct_fields__), None)
    if unknown is not None:
        known = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise ValidationError(f"{PARAM} has no field {unknown!r:.64}; it has {known}", param=PARAM)
    return StructuredOutputsParams(**{name: one for name, one in value.items() if one is not None})


def checked_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """Return the parameters, which may be given as an object. Raises ValidationError."""
    return value if isinstance(value, StructuredOutputsParams | None) else structured_outputs_of(value)


def invalid(name: str, why: str) -> ValidationError:
    """Return an error about one of the fields."""
    field = f"{PARAM}.{name}"
    return ValidationError(f"{field} {why}", param=field)


def _dumped(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is no JSON: {error}"
        raise invalid(name, what) from None


def _checked_choice(choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not choice:
        raise invalid("choice", "must be a list of at least one text")
    for text in choice:
        if not isinstance(text, str) or not text:
            raise invalid("choice", f"must hold texts that are not empty, got {text!r:.100}")
    return tuple(dict.fromkeys(choice))
