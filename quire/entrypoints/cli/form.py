"""The options of commands that generate by which the answer gets a form (docs/structured_output.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def form_options(command: Command) -> Command:
    """Add the options to a command, whose parameters `structured_outputs` takes out."""
    options = (
        click.option(
            "--json-schema", metavar="JSON", help="The answer is JSON of this schema; @FILE reads it."
        ),
        click.option("--regex", help="The answer matches this expression as a whole."),
        click.option("--choice", multiple=True, help="The answer is one of these; given several times."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def structured_outputs(params: dict[str, Any]) -> dict[str, Any] | None:
    """The constraint that a command's options ask for, taken out of its parameters; None if there is none.

    Raises:
        UsageError: there are several, or the schema is no JSON.
    """
    schema, regex, choice = (params.pop(name) for name in ("json_schema", "regex", "choice"))
    given: dict[str, Any] = {"json": _schema(schema), "regex": regex, "choice": list(choice) or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise click.UsageError("give only one of --json-schema, --regex and --choice")
    return given or None


def _schema(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"--json-schema: {error}") from None
