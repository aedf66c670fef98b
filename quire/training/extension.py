# SPDX-License-Identifier: Apache-2.0
"""The operator's extension class on a worker (`--worker-extension-cls`).

Its methods see an object of the class whose other attributes are the worker's: `self.model`, `self.rank`,
`self.config`, and `self.model_runner.model` as in vLLM. Its `__init__` is not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.plugins import import_place

if TYPE_CHECKING:
    from quire.worker.worker import Worker

FLAG = "--worker-extension-cls"


class Extension:
    """Methods of an extension class on one worker; `methods` are the public ones by name."""

    def __init__(self, kind: type, worker: Worker) -> None:
        bound: Any = type(kind.__name__, (kind, _OnWorker), {})
        self._instance: Any = object.__new__(bound)
        self._instance.worker = worker
        self.methods: Mapping[str, Callable[..., Any]] = {
            name: getattr(self._instance, name)
            for name, _ in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("methods", {}):
            return self.methods[name]
        raise AttributeError(name)


class _OnWorker:
    """Attributes of the worker, as far as the class has none of these names."""

    worker: Any

    @property
    def model_runner(self) -> Any:
        return SimpleNamespace(model=self.worker.model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "worker":
            raise AttributeError(name)
        return getattr(self.worker, name)


def open_extension(worker: Worker) -> Extension:
    """Return the extension that the worker's configuration names.

    Raises:
        ConfigError: it cannot be imported, or is no class.
    """
    return Extension(import_extension(worker.config.training.worker_extension_cls), worker)


def import_extension(place: str) -> type:
    """Return the class at "module:Class", or at vLLM's "module.Class".

    Raises:
        ConfigError: it cannot be imported, or is no class.
    """
    if ":" not in place:
        module, _, name = place.rpartition(".")
        place = f"{module}:{name}"
    try:
        found = import_place(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{FLAG}: cannot import {place!r} as module:Class: {error}") from None
    if not isinstance(found, type):
        raise ConfigError(f"{FLAG}: {place!r} is no class")
    return found
