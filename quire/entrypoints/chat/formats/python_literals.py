# SPDX-License-Identifier: Apache-2.0
"""Python literals, parsed by Python's own parser; other expressions are rejected."""

from __future__ import annotations

import ast
import re
from typing import Any

JSON_NAMES = {"true": True, "false": False, "null": None}
# A string; an unterminated one extends to the end of the text, which keeps the search linear.
STRING = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)", re.DOTALL)
LINE_END = re.compile(r"\\.|(?P<end>[\n\r])", re.DOTALL)
# An escape, or a backslash that Python keeps with a warning.
ODD_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtvxuUN\n]|[0-3]?[0-7]{1,2}|(?P<odd>.))", re.DOTALL)


def parse_python(text: str) -> ast.expr:
    """Parse an expression whose strings may contain newlines, as models write them.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is not an expression, or too large for the parser.
    """
    escaped = STRING.sub(lambda string: LINE_END.sub(_escaped, string[0]), text)
    return ast.parse(ODD_ESCAPE.sub(_doubled, escaped), mode="eval").body


def _escaped(found: re.Match[str]) -> str:
    return found[0] if found["end"] is None else repr(found[0])[1:-1]


def _doubled(escape: re.Match[str]) -> str:
    return escape[0] if escape["odd"] is None else rf"\{escape[0]}"


def literal(node: ast.expr) -> Any:
    """Return the value of a literal of Python or JSON.

    Raises:
        ValueError: it is another expression.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise ValueError("no string")
