"""The arguments of a call in an earlier message: JSON text for OpenAI's clients, an object for templates."""

from __future__ import annotations

import json
from typing import Any

from quire.errors import ValidationError


def parsed_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The object that the text says, or that was given.

    Raises:
        ValidationError: names `where`.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValidationError(f"{where} must be the text of a JSON object", param=where) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise ValidationError(f"{where} must be a JSON object", param=where)
    return arguments or {}
