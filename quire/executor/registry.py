"""Which executor a name stands for.

Invariant: an executor's module is imported when it is asked for, so the null executor runs without torch.
"""

from __future__ import annotations

from importlib import import_module

from quire.errors import ConfigError
from quire.executor.base import Executor

_EXECUTORS = {
    "uni": "quire.executor.uniproc:UniprocExecutor",
    "null": "quire.executor.null:NullExecutor",
}


def resolve_executor(name: str) -> type[Executor]:
    """The executor class of a name, as `--distributed-executor-backend` gives it.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _EXECUTORS:
        known = ", ".join(_EXECUTORS)
        raise ConfigError(f"--distributed-executor-backend must be one of {known}, got {name!r}")
    module, _, attribute = _EXECUTORS[name].partition(":")
    executor: type[Executor] = getattr(import_module(module), attribute)
    return executor
