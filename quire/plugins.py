"""Tables to which other installed packages add rows, by entry points.

Invariant: a plug-in's code is imported when its name is asked for, and a name stands for one object only. Every process
of an engine sees the same plug-ins: those that are installed, less those that `QUIRE_PLUGINS` leaves out.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

GENERAL = "quire.plugins"
"""Functions without arguments that every process calls once when it starts, such as one that registers models."""


@functools.cache
def entry_points(group: str, name: str | None = None) -> metadata.EntryPoints:
    """What is installed, by group; a start asks a dozen times, and each search goes through all packages (10 ms)."""
    return (
        metadata.entry_points(group=group) if name is None else metadata.entry_points(group=group, name=name)
    )


T = TypeVar("T")


class PluginTable(Generic[T]):
    """Objects of one kind by name: quire's own, and those of plug-ins.

    Args:
        group: the entry points' group.
        flag: the option or thing that a name is given for, as messages call it.
        built_in: name -> object, or where it is ("module:Name") if it is to be imported when it is asked for.
        expected: whether something that a plug-in offers is of the kind, and the kind's name.
        words: what may stand where a name is given and is none; for messages.
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
        """quire's own in their order, then those of plug-ins."""
        return [*self._built_in, *(name for name in plugin_names(self.group) if name not in self._built_in)]

    def resolve(self, name: str) -> T:
        """The object of a name; a built-in one cannot be replaced.

        Raises:
            ConfigError: there is none of that name, two packages offer different ones, it cannot be imported, or it
                is of another kind.
        """
        if name in self._built_in:
            found = self._built_in[name]
            return cast(T, import_place(found)) if isinstance(found, str) else found
        if name not in plugin_names(self.group):
            known = ", ".join((*self._words, *self.names()))
            raise ConfigError(f"{self._flag} must be one of {known}, got {name!r}")
        return self._load(name)

    def resolve_all(self) -> list[T]:
        """The objects of all `names`; raises as `resolve` does."""
        return [self.resolve(name) for name in self.names()]

    def _load(self, name: str) -> T:
        offered, source = _load(self.group, name)
        if not self._accepts(offered):
            raise ConfigError(
                f"the plug-in {name!r} of {self.group} ({source}) is {offered!r} and no {self._kind}"
            )
        return cast(T, offered)


def instance_of(kind: type) -> tuple[Callable[[object], bool], str]:
    """For a table of instances of a class."""
    return lambda found: isinstance(found, kind), kind.__name__


def subclass_of(kind: type) -> tuple[Callable[[object], bool], str]:
    """For a table of classes."""
    return lambda found: isinstance(found, type) and issubclass(found, kind), f"subclass of {kind.__name__}"


FACTORY: tuple[Callable[[object], bool], str] = (callable, "callable")
"""For a table of things that are called to make an object."""


def plugin_names(group: str) -> list[str]:
    """The names that packages offer in a group of entry points and `QUIRE_PLUGINS` lets in, sorted.

    The variable has names with commas between them; without it all are let in, and if it is empty, none.
    """
    allowed = os.environ.get("QUIRE_PLUGINS")
    names = {point.name for point in entry_points(group=group)}
    if allowed is not None:
        names &= {name.strip() for name in allowed.split(",")}
    return sorted(names)


@functools.cache
def load_general_plugins() -> None:
    """Call the plug-ins that every process calls; further calls do nothing.

    Raises:
        ConfigError: one cannot be imported, is not callable or raises; the message names it.
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
    """The object at "module:Name"; the name may have dots."""
    module, _, name = place.partition(":")
    return attrgetter(name)(import_module(module))


def import_subclass(place: str, kind: type, flag: str) -> Any:
    """The class at "module:Class", as a flag names it.

    Raises:
        ConfigError: it cannot be imported, or is no subclass of `kind`.
    """
    try:
        found = import_place(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{flag}: cannot import {place!r} as module:Class: {error}") from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{flag}: {place!r} is no subclass of {kind.__module__}.{kind.__qualname__}")
    return found


def place_of(found: Any, flag: str) -> str:
    """Where a class can be imported from; a text is such a place already.

    Raises:
        ConfigError: it is neither, or stands in a function, where no import finds it.
    """
    if isinstance(found, str):
        return found
    if not isinstance(found, type) or "<locals>" in found.__qualname__:
        raise ConfigError(f"{flag}: {found!r} must be 'module:Class' or a class at the top level of a module")
    return f"{found.__module__}:{found.__qualname__}"


def _load(group: str, name: str) -> tuple[object, str]:
    """What a package offers under a name of a group, and which package says so."""
    points = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if len(points) != 1:
        offers = ", ".join(sorted(map(_source, points)))
        raise ConfigError(f"the plug-in {name!r} of {group} must be offered by one package, not by {offers}")
    source = _source(points[0])
    try:
        return points[0].load(), source
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the plug-in {name!r} of {group} ({source}) cannot be imported: {error}"
        ) from error


def _source(point: EntryPoint) -> str:
    package = "an unknown package" if point.dist is None else point.dist.name
    return f"{package}: {point.value}"
