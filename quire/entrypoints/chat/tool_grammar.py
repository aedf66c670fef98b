"""Tool calls, and what follows a model's reasoning, as constraints: made of the same rows by which answers are read.

Invariant: what a constraint allows is read as calls of these functions, with arguments that their schemas allow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.entrypoints.chat.formats.constraint import (
    NOTHING,
    Form,
    Schema,
    UnsayableError,
    either,
    fixed,
    listed,
    matching,
    placed,
    row,
)
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.errors import ValidationError
from quire.structured_output.pointer import pointer
from quire.structured_output.structural_tag import settle_tag

GAP = r"[ \n]{0,4}"
"""What may stand between a marker and what it belongs to."""


class Function(NamedTuple):
    """A function that may be called; unless `strict`, with any arguments. `field` of the request is its schema."""

    name: str
    schema: Schema
    strict: bool
    field: str = "tools"


def calls_only(tools: ToolFormat, functions: Iterable[Function], *, at_most_one: bool) -> Form:
    """A text that is one or more calls of these functions, and nothing else.

    Raises:
        ValidationError: they cannot be enforced in this format.
    """
    call = one_call(tools, functions)
    most = 1 if at_most_one else None
    if tools.each:
        return listed(row(fixed(tools.opening), call, fixed(tools.closing)), tools.separator, 1, most)
    content, end = _section(tools, call, most)
    return row(fixed(tools.opening), content, fixed(end))


def one_call(tools: ToolFormat, functions: Iterable[Function]) -> Form:
    """A call of one of these functions, without what stands around calls.

    Raises:
        ValidationError: one cannot be enforced in this format.
    """
    return either([_call(tools, function) for function in functions])


def is_enforceable(tools: ToolFormat, function: Function) -> bool:
    """Whether calls can be kept to the function's schema, as far as that is known without compiling it."""
    try:
        settle_tag(calls_only(tools, [function], at_most_one=True), closed=False)
    except ValidationError:
        return False
    return True


def calls_in_text(tools: ToolFormat, functions: Iterable[Function], *, at_most_one: bool) -> Form:
    """Any text, in which what begins like a call is one of these.

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
    """Text without these, which does not begin with one of those characters."""
    if not excludes and not not_first:
        return {"type": "any_text"}
    return {"type": "any_text", "excludes": list(excludes), "not_first": not_first}


def after_reasoning(
    wanted: Form, reasoning: ReasoningFormat, tools: ToolFormat | None, *, is_open: bool, may_open: bool
) -> Form:
    """What is wanted of an answer, behind its reasoning.

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
    """The calls of one section, and its end.

    Where the text between two calls begins as the end does, it belongs to each call: a grammar does not look ahead.
    """
    separator, closing = tools.separator, tools.closing
    shared = next(
        (text for text, other in ((separator, closing), (closing, separator)) if other.startswith(text)), ""
    )
    if shared:
        call = row(call, fixed(shared))
    return listed(call, separator.removeprefix(shared), 1, most), closing.removeprefix(shared)


def _call(tools: ToolFormat, function: Function) -> Form:
    syntax = tools.calls[0]
    try:
        schema = _with_good_names(tools, function)
        form = syntax.constraint(function.name, schema, strict=function.strict)
    except UnsayableError as error:
        why = f"--tool-call-parser {tools.name} cannot be enforced for the function {function.name!r:.80}: {error}"
        raise ValidationError(
            f"{function.field} at {pointer(error.path)}: {why}", param=function.field
        ) from None
    return placed(form, function.field)


def _with_good_names(tools: ToolFormat, function: Function) -> Schema:
    """Return the function's schema; unless `strict`, without arguments whose names a call cannot hold.

    Raises:
        UnsayableError: the function's name, or that of an argument, would be read as another.
    """
    properties = function.schema.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if _is_read_back(tools, function.name, names):
        return function.schema
    if function.strict or not isinstance(properties, Mapping) or not _is_read_back(tools, function.name, []):
        raise UnsayableError("its name, or that of an argument, would be read as another")
    good = {name: properties[name] for name in names if _is_read_back(tools, function.name, [name])}
    return {**function.schema, "properties": good}


def _is_read_back(tools: ToolFormat, function: str, names: Sequence[str]) -> bool:
    """Tell whether a call with arguments of these names is read as such."""
    syntax = tools.calls[0]
    call = syntax.parse(syntax.write(function, dict.fromkeys(names, 0)), {})
    return call is not None and call.name == function and set(json.loads(call.arguments)) == set(names)
