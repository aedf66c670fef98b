# SPDX-License-Identifier: Apache-2.0
"""Jinja sandbox in which chat templates run.

Invariant: a template is data from a model repository and runs in Jinja's immutable sandbox: no underscore attributes,
no mutation of its inputs, ranges of at most 100 000. Every operation that multiplies its input asks the rendering's
`RenderBudget` first, so no huge text is built and no single call blocks the interpreter for long. So every template
ends, and in an interrupted `RenderingThread` it ends at its next operation: every loop iteration, call and operator
asks the budget, as does each item that a filter or test is mapped over. Within the budget, filters behave like Jinja's
and Python's; names and behavior are those that Hugging Face's templates expect.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from jinja2 import TemplateError, filters, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 2**25  # Characters that one operation may produce; a list item counts as `ITEM` characters.
MAX_TOTAL = 2**29  # Limit of all operations of a rendering together.
# Cost ratio of producing and copying a character: a text that grows piece by piece is copied each time.
CHEAPER = 16
WIDE = 4  # Factor for texts that are not ASCII, whose characters take up to 4 bytes.
ITEM = 64
TURN = 128
CALL = 1024  # Cost of a loop iteration and of a call; the maximum number of them takes a second or two.

MAX_JSON_WIDTH = 32  # Limit of an indentation or separator of JSON.
_WIDTH = re.compile(r"\d{5}")
_NESTED_FIELD = re.compile(r":[^{}]*\{")
REMOVED_FILTERS = ("urlize",)  # Removed filters, whose regular expressions may be slow on long texts.
MAX_BITS = 2**12  # Bits of a product, a power or a dividend.
MAKERS = (dict, Cycler)  # Callables that keep their arguments.
_JOINED, _LITERAL, _TURN, _COMPARED = (
    "~",
    "[]",
    "for",
    "==",
)  # Internal filters, whose names no template can write.
COMPARISONS = ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan",
               "ge", ">=")  # fmt: skip  # Tests of two values.


class TemplateRefusalError(TemplateError):
    """Raised when the template rejects the conversation, or exceeds its budget; the message is for the client."""


class TimeIsUpError(BaseException):
    """Raised by each operation of a template in an interrupted thread; not an `Exception`, so no template's failure."""


class RenderingThread(threading.Thread):
    """Thread whose templates end once any thread has set `is_interrupted`.

    The mark is tested by the template's own operations. An exception that is raised in a thread from outside
    (`PyThreadState_SetAsyncExc`) would also hit finalizers of other objects that run there, and be lost in them.
    """

    is_interrupted = False


class RenderBudget:
    """Remaining part of `MAX_TOTAL` for one rendering, in the thread that makes the budget."""

    def __init__(self) -> None:
        self._left = MAX_TOTAL
        thread = threading.current_thread()
        self._thread = thread if isinstance(thread, RenderingThread) else None

    def spend(self, size: int, purpose: str, *, passing: bool = False) -> None:
        """Reserve output of this size; `passing` output replaces its input, so it costs only time.

        Raises:
            TemplateRefusalError: a limit is exceeded.
            TimeIsUpError: the thread is interrupted.
        """
        if self._thread is not None and self._thread.is_interrupted:
            raise TimeIsUpError
        self._left -= size // CHEAPER if passing else size
        if size > MAX_SIZE or self._left < 0:
            raise TemplateRefusalError(f"{purpose} exceeds the output limit of chat templates")


def size_of(text: str) -> int:
    """Return the weighted number of characters."""
    return len(text) if text.isascii() else WIDE * len(text)


def weigh(value: Any) -> int:
    """Return roughly the characters of a value as text, nested values included each time they occur.

    Stops above `MAX_SIZE`, since values that contain others repeatedly grow exponentially.
    """
    total, waiting = 0, [value]
    while waiting and total <= MAX_SIZE:
        item = waiting.pop()
        total += ITEM
        if isinstance(item, str):
            total += size_of(item)
        elif isinstance(item, bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, list | tuple | set | frozenset):
            total += ITEM * len(item)
            waiting.extend(item if total <= MAX_SIZE else ())
        elif isinstance(item, dict):
            total += 2 * ITEM * len(item)
            waiting.extend([*item, *item.values()] if total <= MAX_SIZE else ())
        elif isinstance(item, Namespace):
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
    return total


def budget_of(context: Context) -> RenderBudget:
    """Return the budget of this rendering."""
    budget = context.budget  # type: ignore[attr-defined]
    assert isinstance(budget, RenderBudget)
    return budget


def size_of_percent(text: str, values: Any) -> int:
    """Return an upper bound of the characters of `text % values`; above the limit for a large width."""
    if re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", text):
        return MAX_SIZE + 1
    return len(text) + text.count("%") * (10_000 + weigh(values)) if "%" in text else len(text)


def size_of_format(text: str, *args: Any, **kwargs: Any) -> int:
    """Return an upper bound of the characters of `text.format(...)`."""
    values = (*args, *kwargs.values())
    if _WIDTH.search(text) or (_NESTED_FIELD.search(text) and not all(map(_is_narrow, values))):
        return MAX_SIZE + 1
    return len(text) + text.count("{") * (10_000 + weigh([args, kwargs]))


def size_of_format_map(text: str, mapping: Any = None, **_: Any) -> int:
    return size_of_format(text, *(mapping.values() if isinstance(mapping, dict) else [mapping]))


def _is_narrow(value: Any) -> bool:
    """Return whether a value is harmless as a width; values inside of containers are not checked."""
    return abs(value) < 10_000 if isinstance(value, int) else isinstance(value, str | float)


def size_of_replace(text: str, old: str = "", new: str = "", count: Any = -1, **_: Any) -> int:
    """Return an upper bound of the characters of `text.replace(...)`."""
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
}  # String method -> upper bound of the characters it produces from the string and its arguments.


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
    """Implement the filter `string`."""
    if not isinstance(value, str):
        budget_of(context).spend(weigh(value), "a text")
        return str(value)
    return value


@pass_context
def joined_texts(context: Context, parts: list[Any]) -> str:
    """Implement the operator `~`."""
    texts = [to_text(context, part) for part in parts]
    budget_of(context).spend(sum(map(size_of, texts)), "~", passing=True)
    return "".join(texts)


@pass_context
def literal(context: Context, value: Any) -> Any:
    """Charge a list, tuple or dict literal to the budget."""
    budget_of(context).spend(weigh(value), "a list")
    return value


@pass_context
def turn(context: Context, size: int) -> str:
    """Charge one loop iteration to the budget; prints nothing."""
    budget_of(context).spend(size, "a loop")
    return ""


@pass_context
def shown(context: Context, value: Any) -> Any:
    """Charge the text of a container that `{{ }}` prints."""
    if isinstance(value, list | tuple | dict):
        budget_of(context).spend(weigh(value), "a list")
    return value


@pass_context
def add_up(
    context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Implement the filter `sum`."""
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
    """Return plain JSON; Jinja's own filter escapes for HTML, which no model was trained on."""
    allowed = {name: options[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in options}
    budget = budget_of(context)
    widths = [
        indent if isinstance(indent, int) else len(indent or ""),
        *map(len, allowed.get("separators") or ()),
    ]
    if max(widths) > MAX_JSON_WIDTH:
        raise TemplateRefusalError("the indent or the separators of tojson are too long")
    budget.spend(weigh(value), "tojson")
    pieces = []
    for piece in json.JSONEncoder(indent=indent, **{"ensure_ascii": False, **allowed}).iterencode(value):
        budget.spend(len(piece), "tojson")
        pieces.append(piece)
    return "".join(pieces)


@pass_context
def compared(context: Context, value: Any) -> Any:
    """Charge a container that a comparison walks, whose items may be large or there many times."""
    if isinstance(value, list | tuple | dict):
        budget_of(context).spend(weigh(value), "a comparison")
    return value


def _comparing(test: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """Return a test that charges the container that it compares with."""

    @pass_context
    def compare(context: Context, value: Any, other: Any) -> bool:
        return test(value, compared(context, other))

    return compare


def _walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges its input before this function of the environment walks it in one go."""

    @pass_context
    def walk(context: Context, value: Any, *args: Any, **options: Any) -> Any:
        budget_of(context).spend(weigh(value), "a filter")
        return function(context.environment, value, *args, **options)

    return walk


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
    "dictsort": _walking(lambda _, *args, **options: filters.do_dictsort(*args, **options)),
    "groupby": _walking(filters.sync_do_groupby),
    "list": _walking(lambda _, value: list(value)),
    "max": _walking(filters.do_max),
    "min": _walking(filters.do_min),
    "sort": _walking(filters.do_sort),
    "unique": _walking(filters.do_unique),
}  # Replacements of Jinja's own filters.


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetedContext(Context):
    """Context of one rendering, with its budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = RenderBudget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, BudgetedContext)
        context.budget = self.budget
        return context


class CountingTransformer(NodeTransformer):
    """AST transformer that routes `~`, comparisons, container literals and loop iterations through internal filters."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _LITERAL)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _LITERAL) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _filtered(operand.expr, _COMPARED)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        num_outputs = sum(1 for _ in node.find_all(nodes.Output))
        size = nodes.Const(TURN + ITEM * num_outputs, lineno=node.lineno)
        node.body = [nodes.Output([_filtered(size, _TURN)], lineno=node.lineno), *node.body]
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Sandbox that charges operators and calls to the budget; constants are not folded at compile time."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    context_class = BudgetedContext

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _size_of(operator, left, right)
        budget_of(context).spend(size, f"an operator {operator}", passing=operator == "+")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget, owner = budget_of(__context), getattr(__obj, "__self__", None)
        method = getattr(__obj, "__wrapped__", __obj)  # `str.format` is wrapped by the sandbox
        text = getattr(method, "__self__", owner)
        name = getattr(method, "__name__", "")
        if isinstance(text, str) and name in METHODS:
            budget.spend(METHODS[name](text, *args, **kwargs), name)
        elif kwargs or (args and any(__obj is maker for maker in MAKERS)):
            budget.spend(weigh([args, kwargs]), "a call")
        budget.spend(CALL, "a call")
        return super().call(__context, __obj, *args, **kwargs)

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Any = None,
        eval_ctx: Any = None,
    ) -> Any:
        """Apply a filter to one item of `map`, and charge the result, since the template may keep all of them."""
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        budget_of(context).spend(weigh(result), "map")
        return result

    def call_test(
        self,
        name: str,
        value: Any,
        args: Any = None,
        kwargs: Any = None,
        context: Any = None,
        eval_ctx: Any = None,
    ) -> Any:
        """Apply a test to one item of `select`, `reject` or the like."""
        budget_of(context).spend(CALL, "a test")
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = CountingTransformer().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        assert isinstance(tree, nodes.Template)
        return tree

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a captured block or a macro."""
        texts = list(pieces)
        if sum(map(len, texts)) > MAX_SIZE:
            raise TemplateRefusalError("a captured block exceeds the output limit of chat templates")
        return "".join(texts)


def _size_of(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, str) and operator == "%":
        return size_of_percent(left, right)
    if isinstance(left, int) and isinstance(right, int):
        many = abs(right) if operator == "**" else 1
        return MAX_SIZE + 1 if left.bit_length() * many + right.bit_length() > MAX_BITS else ITEM
    if operator == "+":
        return _length_of(left) + _length_of(right)
    if operator == "*":
        many, what = (right, left) if isinstance(right, int) else (left, right)
        return _length_of(what) * max(many, 1) if isinstance(many, int) else ITEM
    return ITEM


def _length_of(value: Any) -> int:
    """Return the size of a copied value; nested values are not copied."""
    if isinstance(value, str):
        return size_of(value)
    return ITEM * len(value) if hasattr(value, "__len__") else ITEM


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return a new sandbox with the filters and globals that chat templates use."""
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], finalize=shown
    )
    environment.filters |= {
        **FILTERS,
        _JOINED: joined_texts,
        _LITERAL: literal,
        _TURN: turn,
        _COMPARED: compared,
    }
    tests: dict[str, Any] = environment.tests
    tests |= {name: _comparing(tests[name]) for name in COMPARISONS}
    for name in REMOVED_FILTERS:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
