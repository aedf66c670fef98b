# SPDX-License-Identifier: Apache-2.0
"""Table of grammar backends, which imports none of them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from quire.errors import ConfigError
from quire.plugins import PluginTable
from quire.version import install_command

if TYPE_CHECKING:
    from quire.structured_output.backend import GrammarBackend

AUTO = "auto"
EXTRAS = {"xgrammar": "xgrammar"}  # backend -> its package, which is also quire's extra


def _is_backend(found: object) -> bool:
    from quire.structured_output.backend import (
        GrammarBackend,  # imports numpy, which listing names does not need
    )

    return isinstance(found, type) and issubclass(found, GrammarBackend)


BACKENDS: PluginTable[type[GrammarBackend]] = PluginTable(
    "quire.grammar_backends",
    "the backend of --structured-outputs-config",
    {
        "guidance": "quire.structured_output.guidance:GuidanceBackend",
        "xgrammar": "quire.structured_output.xgrammar_backend:XGrammarBackend",
    },
    (_is_backend, "subclass of GrammarBackend"),
    words=(AUTO,),
)
"""A backend's library is imported on resolution."""


def check_backend(name: str) -> None:
    """Refuse an unknown backend, or one whose package is missing, without importing it.

    Raises:
        ConfigError: names the known backends or the package to install.
    """
    known = (AUTO, *BACKENDS.names())
    if name not in known:
        raise ConfigError(
            f"--structured-outputs-config: backend must be one of {', '.join(known)}, got {name!r}"
        )
    package = EXTRAS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"--structured-outputs-config: the backend {name} needs the package {package}: "
            f"{install_command(package)}"
        )


def resolve_backend(name: str) -> type[GrammarBackend]:
    """Return the backend of a name; "auto" is quire's default.

    Raises:
        ConfigError: see `check_backend`.
    """
    check_backend(name)
    return BACKENDS.resolve("guidance" if name == AUTO else name)
