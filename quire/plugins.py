# SPDX-License-Identifier: Apache-2.0
"""Plug-in tables, extended by entry points of installed packages.

Invariant: a plug-in is imported when its name is requested, and a name stands for one object only. Every process of an
engine uses the same plug-ins: the installed ones, filtered by `QUIRE_PLUGINS`.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from quire.errors import ConfigError
from quire.torch_import import import_deferred

logger = logging.getLogger(__name__)

# Functions without arguments called once at the start of every process, e.g. to register models.
GENERAL = "quire.plugins"


@functools.cache
def entry_points(group: str, name: str | None = None) -> metadata.EntryPoints:
    """Return entry points of a group; cached, since each search goes through all packages (10 ms)."""
    return (
        metadata.entry_points(group=group) if name is None else metadata.entry_points(group=group, name=name)
    )


T = TypeVar("T")


class PluginTable(Generic[T]):
    """Objects of one kind by name: quire's own, and those of plug-ins.

    Args:
        group: the entry points' group.
        flag: option or description of the name in messages.
        built_in: name -> object, or its place ("module:Name") for lazy import.
        expected: check of a plug-in's object, and the kind's name.
        words: other accepted values; for messages.
    """

    def __init__(
        self,
        group: str,
        flag: str,
        built_in: Mapping[str, T | str],
        expected: tuple[Callable[[object], bool], str],
        words: tuple[str, ...] = (),
    ) -> None:
        self.group = group
        self._words = words
        self._flag = flag
        self._built_in = dict(built_in)
        self._accepts, self._kind = expected

    def names(self) -> list[str]:
        """Return quire's own names in their order, then those of plug-ins."""
        return [*self._built_in, *(name for name in plugin_names(self.group) if name not in self._built_in)]

    def resolve(self, name: str) -> T:
        """Return the object of a name; a built-in one cannot be replaced.

        Raises:
            ConfigError: there is none of that name, two packages offer different ones, it cannot be imported, or it
                is of another kind.
        """
        if name in self._built_in:
            found = self._built_in[name]
            return cast(T, import_place(found)) if isinstance(found, str) else found
        if name not in plugin_names(self.group):
            known = ", ".join((*self._words, *self.names()))
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self._flag} must be one of {known}, got {name!r}{hint}")
        return self._load(name)

    def resolve_all(self) -> list[T]:
        """Return the objects of all `names`; raises as `resolve` does."""
        return [self.resolve(name) for name in self.names()]

    def _load(self, name: str) -> T:
        offered, source = _load(self.group, name)
        if not self._accepts(offered):
            raise ConfigError(
                f"the plug-in {name!r} of {self.group} ({source}) is {offered!r}, expected: {self._kind}"
            )
        return cast(T, offered)


def instance_of(kind: type) -> tuple[Callable[[object], bool], str]:
    """Return the check for a table of instances of a class."""
    return lambda found: isinstance(found, kind), kind.__name__


def subclass_of(kind: type) -> tuple[Callable[[object], bool], str]:
    """Return the check for a table of subclasses."""
    return lambda found: isinstance(found, type) and issubclass(found, kind), f"subclass of {kind.__name__}"


FACTORY: tuple[Callable[[object], bool], str] = (callable, "callable")  # Check for a table of factories.


def plugin_names(group: str) -> list[str]:
    """Return the sorted names that packages offer in a group and `QUIRE_PLUGINS` allows.

    The variable holds comma-separated names; unset allows all, and empty none.
    """
    allowed = os.environ.get("QUIRE_PLUGINS")
    names = {point.name for point in entry_points(group=group)}
    if allowed is not None:
        names &= {name.strip() for name in allowed.split(",")}
    return sorted(names)


@functools.cache
def load_general_plugins() -> None:
    """Call the general plug-ins once per process.

    Raises:
        ConfigError: one cannot be imported, is not callable or raises; names it.
    """
    table: PluginTable[Callable[[], object]] = PluginTable(GENERAL, "a plug-in", {}, FACTORY)
    for name in table.names():
        plugin = table.resolve(name)
        try:
            plugin()
        except Exception as error:
            raise ConfigError(f"the plug-in {name!r} of {GENERAL} failed: {error!r}") from error
        logger.info("plug-in %s loaded", name)


def import_place(place: str) -> Any:
    """Import the object at "module:Name"; the name may have dots."""
    module, _, name = place.partition(":")
    if not module.startswith("quire."):
        import_deferred()
    return attrgetter(name)(import_module(module))


def import_subclass(place: str, kind: type, flag: str) -> Any:
    """Import the class at "module:Class", as given to a flag.

    Raises:
        ConfigError: it cannot be imported, or is not a subclass of `kind`.
    """
    try:
        found = import_place(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot import {place!r} as module:Class: {error}") from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{flag}: {place!r} is not a subclass of {kind.__module__}.{kind.__qualname__}")
    return found


def place_of(found: Any, flag: str) -> str:
    """Return the import place of a class; a string is returned as is.

    Raises:
        ConfigError: it is neither, or is defined in a function, where it cannot be imported.
    """
    if isinstance(found, str):
        return found
    if not isinstance(found, type) or "<locals>" in found.__qualname__:
        raise ConfigError(f"{flag}: {found!r} must be 'module:Class' or a class at the top level of a module")
    return f"{found.__module__}:{found.__qualname__}"


def _load(group: str, name: str) -> tuple[object, str]:
    """Return the object that a package offers under a name, and the package."""
    points = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if len(points) != 1:
        offers = ", ".join(sorted(map(_source, points)))
        raise ConfigError(f"the plug-in {name!r} of {group} must be offered by one package, not by {offers}")
    source = _source(points[0])
    import_deferred()
    try:
        return points[0].load(), source
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the plug-in {name!r} of {group} ({source}) cannot be imported: {error}"
        ) from error


def _source(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"{package}: {point.value}"
