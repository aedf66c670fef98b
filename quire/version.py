"""The version of the installed package; the number itself is kept in pyproject.toml alone."""

from __future__ import annotations

from importlib import metadata

UNINSTALLED = "0.0.0+uninstalled"
"""What a source tree that was never installed calls itself."""


def version_of(package: str) -> str | None:
    """The installed version of a package, None if it is not installed; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


__version__ = version_of("quire") or UNINSTALLED
