"""The Jinja environment in which chat templates run.

Invariant: a template is data from a model repository, so it runs in Jinja's immutable sandbox: no attribute
with an underscore, no change to what it is given, ranges of at most 100 000. Names and behaviour are those
that Hugging Face's templates expect.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusalError(TemplateError):
    """The template itself refused the conversation; its message is for the caller."""


def make_environment() -> ImmutableSandboxedEnvironment:
    """A fresh sandbox with the filters and globals that chat templates use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    allowed = {name: options[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in options}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **allowed})


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
