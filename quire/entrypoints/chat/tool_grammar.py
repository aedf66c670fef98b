# SPDX-License-Identifier: Apache-2.0
"""Constraints on answers with tool calls and reasoning, from the same format rows that parse answers.

Invariant: every allowed text is parsed as calls of these functions with valid arguments. A constraint depends on the
state in which the answer begins, as the reader does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.entrypoints.chat.formats.constraint import (
    NOTHING,
    Form,
    Schema,
    UnenforceableError,
    either,
    fixed,
    listed,
    matching,
    placed,
    row,
)
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.errors import ValidationError
from quire.json_schema.schema import pointer
from quire.json_schema.structural_tag import normalize_tag

GAP = r"[ \n]{0,4}"  # White space allowed between a marker and its content.


class AllowedFunction(NamedTuple):
    """Function that may be called; unless `strict`, with any arguments. `field` is the schema's path in the request."""

    name: str
    schema: Schema
    strict: bool
    field: str = "tools"


def calls_only(tools: ToolFormat, functions: Iterable[AllowedFunction], *, at_most_one: bool) -> Form:
    """Match one or more calls of these functions, and nothing else.

    Raises:
        ValidationError: they cannot be enforced in this format.
    """
    call = one_call(tools, functions)
    most = 1 if at_most_one else None
    if tools.each:
        return listed(row(fixed(tools.opening), call, fixed(tools.closing)), tools.separator, 1, most)
    content, end = _section(tools, call, most)
    return row(fixed(tools.opening), content, fixed(end))


def one_call(tools: ToolFormat, functions: Iterable[AllowedFunction]) -> Form:
    """Match one call, without the markers around calls.

    Raises:
        ValidationError: a function cannot be enforced in this format.
    """
    return either([_call(tools, function) for function in functions])


def is_enforceable(tools: ToolFormat, function: AllowedFunction) -> bool:
    """Return whether the function's schema can be enforced, as far as known without compilation."""
    try:
        normalize_tag(calls_only(tools, [function], at_most_one=True), closed=False)
    except ValidationError:
        return False
    return True


def calls_in_text(tools: ToolFormat, functions: Iterable[AllowedFunction], *, at_most_one: bool) -> Form:
    """Match any text in which every call-like beginning is a call of these functions.

    Raises:
        ValidationError: they cannot be enforced in this format.
    """
    calls = list(functions)
    if tools.needs_required:
        reason = "calls of this format begin as text does; use tool_choice required, or no strict functions"
        raise ValidationError(f"--tool-call-parser {tools.name} cannot be enforced: {reason}", param="tools")
    marker = next((opens for opens in tools.opens if tools.opening.startswith(opens)), None)
    if marker is None:
        text = free_text(tools.opens, not_first=tools.bare)
        return either([calls_only(tools, calls, at_most_one=at_most_one), text])
    call = one_call(tools, calls)
    content, end = (call, tools.closing) if tools.each else _section(tools, call, 1 if at_most_one else None)
    tag = {"type": "tag", "begin": tools.opening, "content": content, "end": end}
    others = [opens for opens in tools.opens if opens != marker]
    return {
        "type": "triggered_tags",
        "triggers": [marker],
        "tags": [tag],
        "excludes": others,
        "not_first": tools.bare,
        "at_least_one": False,
        "stop_after_first": at_most_one,
    }


def free_text(excludes: Sequence[str], *, not_first: str = "") -> Form:
    """Match text without `excludes` that does not begin with a character of `not_first`."""
    if not excludes and not not_first:
        return {"type": "any_text"}
    return {"type": "any_text", "excludes": list(excludes), "not_first": not_first}


def after_reasoning(
    wanted: Form, reasoning: ReasoningFormat, tools: ToolFormat | None, *, is_open: bool, may_open: bool
) -> Form:
    """Match reasoning followed by `wanted`.

    Args:
        is_open: the answer begins inside of the reasoning.
        may_open: it may begin with reasoning.
    """
    thought: Form = {
        "type": "triggered_tags",
        "triggers": list(reasoning.closes),
        "tags": [
            {"type": "tag", "begin": close, "content": matching(GAP), "end": ""} for close in reasoning.closes
        ],
        "excludes": list(tools.opens) if tools is not None and reasoning.ends_at_calls else [],
        "at_least_one": True,
        "stop_after_first": True,
    }
    if is_open:
        return row(thought, wanted)
    if not may_open:
        return wanted
    opened = [row(fixed(marker), thought) for marker in reasoning.opens]
    return row(either([*opened, NOTHING]), wanted)


def _section(tools: ToolFormat, call: Form, most: int | None) -> tuple[Form, str]:
    """Return the calls of one section, and its end.

    If the separator and the end share a beginning, it becomes part of each call, since a grammar has no lookahead.
    """
    separator, closing = tools.separator, tools.closing
    shared = next(
        (text for text, other in ((separator, closing), (closing, separator)) if other.startswith(text)), ""
    )
    if shared:
        call = row(call, fixed(shared))
    return listed(call, separator.removeprefix(shared), 1, most), closing.removeprefix(shared)


def _call(tools: ToolFormat, function: AllowedFunction) -> Form:
    syntax = tools.calls[0]
    try:
        schema = _with_good_names(tools, function)
        form = syntax.constraint(function.name, schema, strict=function.strict)
    except UnenforceableError as error:
        why = f"--tool-call-parser {tools.name} cannot be enforced for the function {function.name!r:.80}: {error}"
        raise ValidationError(
            f"{function.field} at {pointer(error.path)}: {why}", param=function.field
        ) from None
    return placed(form, function.field)


def _with_good_names(tools: ToolFormat, function: AllowedFunction) -> Schema:
    """Return the function's schema; unless `strict`, without arguments whose names a call cannot express.

    Raises:
        UnenforceableError: the function's name, or an argument's, would be parsed differently.
    """
    properties = function.schema.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if _is_read_back(tools, function.name, names):
        return function.schema
    if function.strict or not isinstance(properties, Mapping) or not _is_read_back(tools, function.name, []):
        raise UnenforceableError("its name, or that of an argument, would be read as another")
    good = {name: properties[name] for name in names if _is_read_back(tools, function.name, [name])}
    return {**function.schema, "properties": good}


def _is_read_back(tools: ToolFormat, function: str, names: Sequence[str]) -> bool:
    """Return whether a call with arguments of these names is parsed back identically."""
    syntax = tools.calls[0]
    call = syntax.parse(syntax.write(function, dict.fromkeys(names, 0)), {})
    return call is not None and call.name == function and set(json.loads(call.arguments)) == set(names)


class AllowedCalls(NamedTuple):
    """Functions that may be called, and whether several calls are allowed."""

    functions: list[AllowedFunction]
    at_most_one: bool


class AnswerGrammar(Protocol):
    """Grammar of one answer in its model's format.

    Raises:
        ValidationError: the constraint cannot be enforced in this format, or from this state.
    """

    def text(self, wanted: Form) -> Form:
        """Match this text without calls; returns `wanted` itself if nothing precedes it."""
        ...

    def calls(self, calls: AllowedCalls) -> Form:
        """Match one or more calls without text."""
        ...

    def text_or_calls(self, wanted: Form, calls: AllowedCalls) -> Form:
        """Match either of both."""
        ...

    def calls_in_text(self, calls: AllowedCalls) -> Form:
        """Match any text in which every call-like beginning is a call of these functions."""
        ...


@dataclass(frozen=True)
class MarkerGrammar:
    """Grammar of a format with markers; see `AnswerGrammar`.

    Args:
        is_open: the answer begins inside of the reasoning.
        may_open: it may begin with reasoning.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    is_open: bool = False
    may_open: bool = True

    def text(self, wanted: Form) -> Form:
        if self.reasoning is None:
            return wanted
        return after_reasoning(
            wanted, self.reasoning, self.tools, is_open=self.is_open, may_open=self.may_open
        )

    def calls(self, calls: AllowedCalls) -> Form:
        return self.text(self._only(calls))

    def text_or_calls(self, wanted: Form, calls: AllowedCalls) -> Form:
        return self.text(either([wanted, self._only(calls)]))

    def calls_in_text(self, calls: AllowedCalls) -> Form:
        return self.text(calls_in_text(self._tools, calls.functions, at_most_one=calls.at_most_one))

    def _only(self, calls: AllowedCalls) -> Form:
        return calls_only(self._tools, calls.functions, at_most_one=calls.at_most_one)

    @property
    def _tools(self) -> ToolFormat:
        assert self.tools is not None, "checked by `tools_in_use`"
        return self.tools
