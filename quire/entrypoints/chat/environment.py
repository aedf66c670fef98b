"""The Jinja environment in which chat templates run.

Invariant: a template is data from a model repository, so it runs in Jinja's immutable sandbox: no attribute
with an underscore, no change to what it is given, ranges of at most 100 000, and no single operator that would
keep the interpreter busy for long: who ends a template that loops (`BoundedThreads`) can do so between two of them.
Names and behaviour are those that Hugging Face's templates expect.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 2**25
"""Characters or items that one operator may make."""
MAX_BITS = 2**12
"""Of a product or power."""


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusalError(TemplateError):
    """The template itself refused the conversation; its message is for the caller."""


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Looks at the operands of what can make much out of little; constants are not computed ahead then."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _makes_too_much(operator, left, right):
            raise TemplateRefusalError(f"an operator {operator} that makes too much of its operands")
        return super().call_binop(context, operator, left, right)


def _makes_too_much(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{5}|\*)", left) is not None
    if isinstance(left, int) and isinstance(right, int):
        many = abs(right) if operator == "**" else 1
        return left.bit_length() * many + right.bit_length() > MAX_BITS
    if operator == "*" and isinstance(right, int):
        left, right = right, left
    return (
        operator == "*"
        and isinstance(left, int)
        and hasattr(right, "__len__")
        and left * len(right) > MAX_SIZE
    )


def make_environment() -> ImmutableSandboxedEnvironment:
    """A fresh sandbox with the filters and globals that chat templates use."""
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["format"] = _format
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    allowed = {name: options[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in options}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **allowed})


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    """As Jinja's own, which computes without asking the sandbox."""
    if _makes_too_much("%", value, args):
        raise TemplateRefusalError("a format that makes too much of its values")
    return str(value % (kwargs or args))


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
