"""JSON pointers (RFC 6901)."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

Path = tuple[str, ...]


def pointer(path: Path) -> str:
    """The pointer to a place, as an error names it; "/" is the whole document."""
    return "/" + "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def path_of(fragment: str) -> Path:
    """The place that the fragment of a `$ref` ("#/a/b") names."""
    parts = unquote(fragment.removeprefix("#")).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def find(document: Any, path: Path) -> Any:
    """What stands at a place.

    Raises:
        LookupError: nothing does.
    """
    for part in path:
        if isinstance(document, list):
            if not part.isdigit() or int(part) >= len(document):
                raise LookupError(part)
            document = document[int(part)]
        elif isinstance(document, dict):
            document = document[part]
        else:
            raise LookupError(part)
    return document
