"""Jinja's filters and methods of strings that make much out of little, each asking the rendering's budget first.

Invariant: within the budget they give what Jinja's and Python's own give. A filter that is given the context is not
computed while a template is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import filters, pass_context
from jinja2.runtime import Context

from quire.entrypoints.chat.budget import ITEM, MAX_SIZE, Budget, TemplateRefusalError, size_of, weigh

MAX_JSON_WIDTH = 32
"""Characters of an indentation or a separator of JSON."""

_WIDTH = re.compile(r"\d{5}")
_NESTED_FIELD = re.compile(r":[^{}]*\{")


def budget_of(context: Context) -> Budget:
    """What this rendering may still make."""
    budget = context.budget  # type: ignore[attr-defined]
    assert isinstance(budget, Budget)
    return budget


def size_of_percent(text: str, values: Any) -> int:
    """Characters of `text % values`, at most; beyond all bounds if a width is."""
    if re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        return MAX_SIZE + 1
    return len(text) + text.count("%") * (10_000 + weigh(values)) if "%" in text else len(text)


def size_of_format(text: str, *args: Any, **kwargs: Any) -> int:
    """Characters of `text.format(...)`, at most."""
    values = (*args, *kwargs.values())
    if _WIDTH.search(text) or (_NESTED_FIELD.search(text) and not all(map(_is_narrow, values))):
        return MAX_SIZE + 1
    return len(text) + text.count("{") * (10_000 + weigh([args, kwargs]))


def size_of_format_map(text: str, mapping: Any = None, **_: Any) -> int:
    return size_of_format(text, *(mapping.values() if isinstance(mapping, dict) else [mapping]))


def _is_narrow(value: Any) -> bool:
    """Whether a value, taken as a width, is of no harm; what a container or an object holds may be."""
    return abs(value) < 10_000 if isinstance(value, int) else isinstance(value, str | float)


def size_of_replace(text: str, old: str = "", new: str = "", count: Any = -1, **_: Any) -> int:
    """Characters of `text.replace(...)`, at most."""
    return size_of(text) + text.count(old) * size_of(new)


def size_of_fill(text: str, width: Any = 0, *_: Any, **__: Any) -> int:
    return max(len(text), _number(width))


def size_of_tabs(text: str, tabsize: Any = 8, **_: Any) -> int:
    return len(text) + text.count("\t") * abs(_number(tabsize))


def size_of_join(separator: str, parts: Any = (), **_: Any) -> int:
    return weigh(parts) + len(separator) * (len(parts) if hasattr(parts, "__len__") else MAX_SIZE)


def size_of_translation(text: str, table: Any = None, **_: Any) -> int:
    return len(text) * max(1, weigh(table))


def size_of_pieces(text: str, *_: Any, **__: Any) -> int:
    return len(text) * ITEM


METHODS: dict[str, Callable[..., int]] = {
    "center": size_of_fill,
    "ljust": size_of_fill,
    "rjust": size_of_fill,
    "zfill": size_of_fill,
    "expandtabs": size_of_tabs,
    "replace": size_of_replace,
    "join": size_of_join,
    "format": size_of_format,
    "format_map": size_of_format_map,
    "translate": size_of_translation,
    "split": size_of_pieces,
    "rsplit": size_of_pieces,
    "splitlines": size_of_pieces,
}
"""Method of a string -> characters that it makes of the string and these arguments, at most."""


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


@pass_context
def center(context: Context, value: Any, width: int = 80) -> str:
    text = to_text(context, value)
    budget_of(context).spend(size_of_fill(text, width), "center")
    return text.center(width)


@pass_context
def indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = to_text(context, s)
    num_wide = len(width) if isinstance(width, str) else _number(width)
    budget_of(context).spend(len(text) + num_wide * (1 + text.count("\n")), "indent")
    return filters.do_indent(text, width, first, blank)


@pass_context
def wordwrap(
    context: Context,
    s: Any,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    text = to_text(context, s)
    budget_of(context).spend(len(text) * max(ITEM, len(wrapstring or "")), "wordwrap")
    options = (width, break_long_words, wrapstring, break_on_hyphens)
    return filters.do_wordwrap(context.environment, text, *options)


@pass_context
def replace(context: Context, s: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = (to_text(context, one) for one in (s, old, new))
    budget_of(context).spend(size_of_replace(text, old, new), "replace")
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def join(context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    budget, separator = budget_of(context), to_text(context, d)
    if attribute is not None:
        value = map(filters.make_attrgetter(context.environment, attribute), value)
    texts = []
    for item in value:
        texts.append(to_text(context, item))
        budget.spend(ITEM, "join")
    budget.spend(sum(map(size_of, texts)) + size_of(separator) * len(texts), "join")
    return separator.join(texts)


@pass_context
def percent_format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    text = to_text(context, value)
    budget_of(context).spend(size_of_percent(text, [args, kwargs]), "format")
    return filters.do_format(text, *args, **kwargs)


@pass_context
def to_text(context: Context, value: Any) -> str:
    """The filter `string`."""
    if not isinstance(value, str):
        budget_of(context).spend(weigh(value), "a text")
        return str(value)
    return value


@pass_context
def joined_texts(context: Context, parts: list[Any]) -> str:
    """What `~` makes."""
    texts = [to_text(context, part) for part in parts]
    budget_of(context).spend(sum(map(size_of, texts)), "~", passing=True)
    return "".join(texts)


@pass_context
def literal(context: Context, value: Any) -> Any:
    """A list, tuple or dict that a template writes down."""
    budget_of(context).spend(weigh(value), "a list")
    return value


@pass_context
def turn(context: Context, size: int) -> str:
    """Of a loop; shows nothing."""
    budget_of(context).spend(size, "a loop")
    return ""


@pass_context
def shown(context: Context, value: Any) -> Any:
    """What `{{ }}` shows is written as text at once."""
    if isinstance(value, list | tuple | dict):
        budget_of(context).spend(weigh(value), "a list")
    return value


@pass_context
def add_up(
    context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """The filter `sum`."""
    if attribute is not None:
        iterable = map(filters.make_attrgetter(context.environment, attribute), iterable)
    for item in iterable:
        start = context.environment.call_binop(context, "+", start, item)  # type: ignore[attr-defined]
    return start


@pass_context
def batch(
    context: Context, value: Iterable[Any], linecount: int, fill_with: Any = None
) -> Iterator[list[Any]]:
    budget_of(context).spend(weigh(fill_with) * abs(_number(linecount)), "batch")
    return filters.do_batch(value, linecount, fill_with)


@pass_context
def slices(context: Context, value: Iterable[Any], slices: int, fill_with: Any = None) -> Iterator[list[Any]]:
    budget_of(context).spend(weigh(fill_with) * abs(_number(slices)), "slice")
    return filters.sync_do_slice(list(value), slices, fill_with)


@pass_context
def to_json(context: Context, value: Any, indent: int | str | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    allowed = {name: options[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in options}
    budget = budget_of(context)
    widths = [
        indent if isinstance(indent, int) else len(indent or ""),
        *map(len, allowed.get("separators") or ()),
    ]
    if max(widths) > MAX_JSON_WIDTH:
        raise TemplateRefusalError("tojson makes too much of its indent or its separators")
    budget.spend(weigh(value), "tojson")
    pieces = []
    for piece in json.JSONEncoder(indent=indent, **{"ensure_ascii": False, **allowed}).iterencode(value):
        budget.spend(len(piece), "tojson")
        pieces.append(piece)
    return "".join(pieces)


FILTERS: dict[str, Callable[..., Any]] = {
    "center": center,
    "indent": indent,
    "wordwrap": wordwrap,
    "replace": replace,
    "join": join,
    "format": percent_format,
    "string": to_text,
    "sum": add_up,
    "batch": batch,
    "slice": slices,
    "tojson": to_json,
}
"""In place of Jinja's own."""
LEFT_OUT = ("urlize",)
"""Filters whose regular expressions may take long over a text; no chat template wants links."""
