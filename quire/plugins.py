"""Plug-ins: objects that other installed packages offer under a name, found through entry points.

Invariant: a plug-in's code is imported when its name is asked for, and a name stands for one object only.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from quire.errors import ConfigError

T = TypeVar("T")


def plugin_names(group: str) -> list[str]:
    """The names that packages offer in a group of entry points, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str, expected: type[T]) -> T:
    """The object that a package offers under a name of `plugin_names`.

    Raises:
        ConfigError: two packages offer different objects under it, it cannot be imported, or it is of another type.
    """
    points = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if len(points) != 1:
        offers = ", ".join(sorted(map(_source, points))) or "nobody"
        raise ConfigError(f"the plug-in {name!r} of {group} must be offered by one package, not by {offers}")
    try:
        found = points[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the plug-in {name!r} of {group} ({_source(points[0])}) cannot be imported: {error}"
        ) from error
    if not isinstance(found, expected):
        raise ConfigError(
            f"the plug-in {name!r} of {group} ({_source(points[0])}) is {found!r} and no {expected.__name__}"
        )
    return found


def _source(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"{package}: {point.value}"
