"""Strings as constraints, where they are written without quotes: which expression a string's schema is."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quire.entrypoints.chat.formats.constraint import ANNOTATIONS, Schema, UnsayableError
from quire.structured_output.ecma_regex import RegexError, to_rust
from quire.structured_output.formats import AS_PATTERN, LIBRARY, REFUSED

ANY = "(?s:.)*"
LENGTHS = frozenset({"minLength", "maxLength"})
EXPRESSIONS = frozenset({"pattern", "format"})


def text_pattern(schema: Schema, char: str = "(?s:.)") -> str:
    """The expression, in Rust's syntax, of the strings of a schema.

    Args:
        char: the expression of one character, as the syntax writes it.

    Raises:
        UnsayableError: there is none.
    """
    others = sorted(schema.keys() - ANNOTATIONS - LENGTHS - EXPRESSIONS - {"type"})
    if others:
        raise UnsayableError(f"the keyword {others[0]} of a string")
    expression = next(_expressions(schema), None)
    has_length = bool(schema.keys() & LENGTHS)
    if expression is None:
        return f"(?:{char}){_counts(schema)}" if has_length else f"(?:{char})*"
    if has_length or len(list(_expressions(schema))) > 1 or char != "(?s:.)":
        raise UnsayableError("the keyword pattern or format of a string, beside others or in quotes")
    return expression


def _counts(schema: Schema) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if type(least) is not int or least < 0 or type(most) not in (int, str) or (most != "" and most < least):
        raise UnsayableError("minLength or maxLength, which must be integers in order")
    return f"{{{least},{most}}}"


def _expressions(schema: Schema) -> Iterator[str]:
    if "pattern" in schema:
        yield _searched(str(schema["pattern"]))
    name = schema.get("format")
    if name in LIBRARY or name in REFUSED:
        raise UnsayableError(f"the format {name}")
    if name in AS_PATTERN:
        yield AS_PATTERN[name]


def _searched(pattern: str) -> str:
    """What holds a match somewhere, as a schema means it; anchors may stand at the ends alone."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    if (begins or ends) and "|" in re.sub(r"\(.*\)|\[[^\]]*\]|\\.", "", inner, flags=re.DOTALL):
        raise UnsayableError("a pattern with anchors and alternatives")
    if re.search(r"[\^$]", re.sub(r"\[[^\]]*\]|\\.", "", inner, flags=re.DOTALL)):
        raise UnsayableError("a pattern with anchors inside")
    try:
        return f"{'' if begins else ANY}(?:{to_rust(inner)}){'' if ends else ANY}"
    except RegexError as error:
        raise UnsayableError(f"a pattern: {error}") from None
