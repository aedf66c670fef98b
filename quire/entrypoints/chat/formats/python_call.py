"""Calls as Python writes them. Python's own parser reads them, and only literals are taken from what it gives."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import (
    Form,
    Schema,
    arguments_of,
    fields,
    fixed,
    row,
    verbatim,
)
from quire.entrypoints.chat.formats.ends import MAX_HEAD_CHARS, End, python_end
from quire.entrypoints.chat.formats.events import ToolCall, Tools
from quire.entrypoints.chat.formats.literals import PythonLiterals

JSON_NAMES = {"true": True, "false": False, "null": None}
ODD_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtvxuUN\n]|[0-3]?[0-7]{1,2}|(?P<odd>.))", re.DOTALL)
"""An escape, or a backslash that is none to Python, which keeps both characters and warns."""


@dataclass(frozen=True)
class PythonCall:
    """`name(key=value, ...)`, values being Python's or JSON's literals."""

    before: ClassVar[str] = ""
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        found = re.match(r"[A-Za-z_][\w.\-]*\s*", text)
        if found is None:
            return False
        if found.end() < len(text):
            return text[found.end()] == "("
        return None if len(text) <= MAX_HEAD_CHARS else False

    def end(self) -> End:
        return python_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        name, _, rest = text.partition("(")
        try:
            call = ast.parse(f"_({ODD_ESCAPE.sub(_doubled, rest)}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            said = {str(word.arg): literal(word.value) for word in call.keywords if word.arg is not None}
            if len(said) != len(call.keywords):
                return None
            arguments = json.dumps(said, ensure_ascii=False, allow_nan=False)
            arguments.encode()  # half of a character can be written in Python, and not be sent
            return ToolCall(name.strip(), arguments)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def write(self, name: str, arguments: Mapping[str, Any], index: int = 0) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def constraint(self, name: str, schema: Schema, *, strict: bool) -> Form:
        arguments, values = arguments_of(schema, strict=strict), PythonLiterals(schema)
        words = [row(verbatim(f"{one.name}="), values.argument(one)) for one in arguments]
        body = fields(words, [one.is_required for one in arguments], ", ")
        return row(verbatim(f"{name}("), body, fixed(")"))


def _doubled(escape: re.Match[str]) -> str:
    return escape[0] if escape["odd"] is None else rf"\{escape[0]}"


def literal(node: ast.expr) -> Any:
    """The value of a literal of Python or JSON.

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
