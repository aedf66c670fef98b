# SPDX-License-Identifier: Apache-2.0
"""Version of the installed package, and the command that adds an optional dependency to it.

The version number itself is in pyproject.toml only.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata

DISTRIBUTION = "quire-llm"  # the name on PyPI, where "quire" belongs to another project
UNINSTALLED = "0.0.0+uninstalled"  # the version of a source tree that was never installed
_OF_EXTRA = re.compile(r"""(?P<requirement>[^;]+);.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the shell command that adds what an extra needs to the environment of this interpreter.

    The command names the packages themselves, so it is right for a clone, a wheel and an installation from an index.
    """
    needed = _requirements(extra) or [f"{DISTRIBUTION}[{extra}]"]
    if importlib.util.find_spec("pip") is None:  # environments made by uv have none
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *needed])
    return shlex.join([sys.executable, "-m", "pip", "install", *needed])


def _requirements(extra: str) -> list[str]:
    try:
        listed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    matches = [match for line in listed if (match := _OF_EXTRA.fullmatch(line))]
    return [match["requirement"].strip() for match in matches if match["extra"] == extra]


__version__ = version_of(DISTRIBUTION) or UNINSTALLED
