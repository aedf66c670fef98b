"""From `--scheduler-cls` to a class.

Invariant: the name comes from the operator, never from a request, so importing what it names is theirs to decide.
"""

from __future__ import annotations

from importlib import import_module

from quire.errors import ConfigError
from quire.scheduler.scheduler import Scheduler


def resolve_scheduler(name: str) -> type[Scheduler]:
    """The class that `module:Class` names; the built-in one for an empty name.

    Raises:
        ConfigError: there is no such class, or it is no subclass of `Scheduler`.
    """
    if not name:
        return Scheduler
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--scheduler-cls: cannot import {name!r} as module:Class: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(f"--scheduler-cls: {name!r} is no subclass of quire.scheduler.scheduler.Scheduler")
    return found
