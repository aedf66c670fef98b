"""Literals of Python. Python's own parser reads them, and nothing else is taken from what it gives."""

from __future__ import annotations

import ast
import re
from typing import Any

JSON_NAMES = {"true": True, "false": False, "null": None}
STRING = re.compile(r"'(?:[^'\\]|\\.)*+(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\\?\Z)", re.DOTALL)
"""A string; one without an end goes on to that of the text, which keeps the search linear."""
LINE_END = re.compile(r"\\.|(?P<end>[\n\r])", re.DOTALL)
ODD_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtvxuUN\n]|[0-3]?[0-7]{1,2}|(?P<odd>.))", re.DOTALL)
"""An escape, or a backslash that is none to Python, which keeps both characters and warns."""


def parse_python(text: str) -> ast.expr:
    """Parse an expression, in which lines may end within strings, as models write them.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is none, or too much for the parser.
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
        ValueError: it is something else.
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
