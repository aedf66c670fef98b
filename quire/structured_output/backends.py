"""The table of grammar backends, which imports none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.plugins import PluginTable

if TYPE_CHECKING:
    from quire.structured_output.backend import GrammarBackend

AUTO = "auto"


def _is_backend(found: object) -> bool:
    from quire.structured_output.backend import (
        GrammarBackend,  # numpy, which who asks for names can do without
    )

    return isinstance(found, type) and issubclass(found, GrammarBackend)


BACKENDS: PluginTable[type[GrammarBackend]] = PluginTable(
    "quire.grammar_backends",
    "the backend of --structured-outputs-config",
    {"guidance": "quire.structured_output.guidance:GuidanceBackend"},
    (_is_backend, "subclass of GrammarBackend"),
    words=(AUTO,),
)
"""A backend's library is imported when it is asked for."""


def resolve_backend(name: str) -> type[GrammarBackend]:
    """The backend of a name; "auto" is the one that comes with quire.

    Raises:
        ConfigError: there is none of that name, or its library is not installed.
    """
    return BACKENDS.resolve("guidance" if name == AUTO else name)
