"""`StructuredOutputsParams`: what a request's text must be. Names and meanings are vLLM's.

Invariant: an instance holds exactly one constraint, of the right type; whether it can be honoured is for `settle` and
the backend to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.errors import ValidationError

PARAM = "structured_outputs"
FAULT = f"{PARAM} cannot be enforced any further: "
"""Beginning of the reason why a text failed, where the constraint of its request is at fault."""
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FLAGS = ("disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """One constraint, and how it is read. None is absent.

    Args:
        json: a JSON schema, as an object or as its text; the text is a JSON value that it validates.
        regex: the whole text matches this expression.
        choice: the text is one of these.
        grammar: a context-free grammar in EBNF, either as Lark writes it or as llama.cpp's GBNF.
        json_object: true: the text is a JSON object.
        structural_tag: pieces of fixed and of free text, schemas and expressions (see structured_output.md).
        disable_any_whitespace: JSON without spaces or line breaks between its tokens.
        disable_additional_properties: objects have no properties but those that a schema names, unless it says so.
        whitespace_pattern: expression for what may stand between the tokens of JSON.

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
        """The name of the constraint."""
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    @property
    def json_value(self) -> Any:
        """The schema; raises ValidationError if its text is no JSON."""
        try:
            return json.loads(str(self.json))
        except (ValueError, RecursionError) as error:
            raise invalid("json", f"is no valid JSON: {error}") from None

    @property
    def key(self) -> bytes:
        """Equal for equal parameters."""
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
        """JSON is kept as text, which cannot change and keeps the order of its keys."""
        for name in ("json", "structural_tag"):
            value = getattr(self, name)
            if isinstance(value, dict | bool):
                msgspec.structs.force_setattr(self, name, _dumped(name, value))
            elif value is not None and (not isinstance(value, str) or not value):
                raise invalid(name, "must be a JSON object or its text")
        if self.choice is not None:
            msgspec.structs.force_setattr(self, "choice", _checked_choice(self.choice))


def structured_outputs_of(value: Any) -> StructuredOutputsParams:
    """Parameters from an object with their names, as a request has it; null is absent.

    Raises:
        ValidationError: as of `StructuredOutputsParams`, or a name is unknown.
    """
    if not isinstance(value, dict):
        raise ValidationError(f"{PARAM} must be an object, got {type(value).__name__}", param=PARAM)
    unknown = next((name for name in value if name not in StructuredOutputsParams.__struct_fields__), None)
    if unknown is not None:
        known = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise ValidationError(f"{PARAM} has no field {unknown!r:.64}; it has {known}", param=PARAM)
    return StructuredOutputsParams(**{name: one for name, one in value.items() if one is not None})


def checked_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """The parameters, of which a program may also give the fields; None is none. Raises ValidationError."""
    return value if isinstance(value, StructuredOutputsParams | None) else structured_outputs_of(value)


def invalid(name: str, why: str) -> ValidationError:
    """An error about one of the fields."""
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
