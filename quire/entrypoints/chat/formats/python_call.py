# SPDX-License-Identifier: Apache-2.0
"""Python-style calls, parsed by Python's own parser; only literals are accepted as values."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.entrypoints.chat.formats.constraint import Form, Schema, arguments_of, fields, fixed, row, verbatim
from quire.entrypoints.chat.formats.elements import PythonLiterals
from quire.entrypoints.chat.formats.python_literals import literal, parse_python
from quire.entrypoints.chat.formats.scanning import MAX_HEAD_CHARS, CallEnd, ToolCall, Tools, python_end
from quire.entrypoints.chat.formats.syntax import is_begun


@dataclass(frozen=True)
class PythonCall:
    """`name(key=value, ...)` with literals of Python or JSON."""

    before: ClassVar[str] = ""
    needs_marker: ClassVar[bool] = False

    def begins(self, text: str) -> bool | None:
        found = re.match(r"[A-Za-z_][\w.\-]*\s*", text)
        if found is None:
            return False
        if found.end() < len(text):
            return text[found.end()] == "("
        return None if len(text) <= MAX_HEAD_CHARS else False

    def may_begin(self, text: str, tools: Tools) -> bool:
        found = re.match(r"([\w.\-]*)\s*(.?)", text)
        assert found is not None, "both parts may be empty"
        return found[2] in ("", "(") and is_begun(found[1], tools, is_whole=bool(found[2]))

    def end(self) -> CallEnd:
        return python_end()

    def parse(self, text: str, tools: Tools) -> ToolCall | None:
        name, _, rest = text.partition("(")
        try:
            call = parse_python(f"_({rest}")
            if not isinstance(call, ast.Call) or call.args:
                return None
            said = {str(word.arg): literal(word.value) for word in call.keywords if word.arg is not None}
            if len(said) != len(call.keywords):
                return None
            arguments = json.dumps(said, ensure_ascii=False, allow_nan=False)
            arguments.encode()  # Python can express lone surrogates, which cannot be encoded
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
