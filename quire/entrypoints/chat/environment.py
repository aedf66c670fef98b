"""The Jinja environment in which chat templates run.

Invariant: a template is data from a model repository, so it runs in Jinja's immutable sandbox: no attribute
with an underscore, no change to what it is given, ranges of at most 100 000. What it makes is counted before it is
made (`Budget`), so nothing of a gigabyte is ever built, and no single operation keeps the interpreter busy for long: a
template that loops comes to an end, and who ends it before that (`BoundedThreads`) can do so between two of them. Names
and behaviour are those that Hugging Face's templates expect.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler
from jinja2.visitor import NodeTransformer

from quire.entrypoints.chat.bounded_filters import (
    FILTERS,
    LEFT_OUT,
    METHODS,
    budget_of,
    joined_texts,
    literal,
    shown,
    size_of_percent,
    turn,
)
from quire.entrypoints.chat.budget import (
    CALL,
    ITEM,
    MAX_SIZE,
    TURN,
    Budget,
    TemplateRefusalError,
    size_of,
    weigh,
)

MAX_BITS = 2**12
"""Of a product, a power or what is divided."""
MAKERS = (dict, Cycler)
"""What is called with things to keep."""

_JOINED, _LITERAL, _TURN = "~", "[]", "for"
"""Filters that no template can name."""


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetedContext(Context):
    """Of one rendering, with what it may make."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, BudgetedContext)
        context.budget = self.budget
        return context


class Countable(NodeTransformer):
    """Lets what cannot be intercepted go through filters: `~`, literals of lists, and turns of loops."""

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

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        num_outputs = sum(1 for _ in node.find_all(nodes.Output))
        size = nodes.Const(TURN + ITEM * num_outputs, lineno=node.lineno)
        node.body = [nodes.Output([_filtered(size, _TURN)], lineno=node.lineno), *node.body]
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Looks at the operands of what can make much out of little; constants are not computed ahead then."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})
    context_class = BudgetedContext

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _size_of(operator, left, right)
        budget_of(context).spend(size, f"an operator {operator}", passing=operator == "+")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget, owner = budget_of(__context), getattr(__obj, "__self__", None)
        method = getattr(__obj, "__wrapped__", __obj)  # that of `str.format` is wrapped by the sandbox
        text = getattr(method, "__self__", owner)
        name = getattr(method, "__name__", "")
        if isinstance(text, str) and name in METHODS:
            budget.spend(METHODS[name](text, *args, **kwargs), name)
        elif kwargs or (args and any(__obj is maker for maker in MAKERS)):
            budget.spend(weigh([args, kwargs]), "a call")
        budget.spend(CALL, "a call")
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Countable().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        assert isinstance(tree, nodes.Template)
        return tree

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What a block that is kept, or a macro, has shown."""
        texts = list(pieces)
        if sum(map(len, texts)) > MAX_SIZE:
            raise TemplateRefusalError("a block makes too much of what it is given")
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
    """Of what is copied; what a list holds is not."""
    if isinstance(value, str):
        return size_of(value)
    return ITEM * len(value) if hasattr(value, "__len__") else ITEM


def make_environment() -> ImmutableSandboxedEnvironment:
    """A fresh sandbox with the filters and globals that chat templates use."""
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], finalize=shown
    )
    environment.filters |= {**FILTERS, _JOINED: joined_texts, _LITERAL: literal, _TURN: turn}
    for name in LEFT_OUT:
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
