"""Python functions of the user that a model may call: found by name, asked about, run.

Invariant: whatever the model or the function does wrong becomes the text of a result, which the model reads.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.entrypoints.cli.function_schema import tool_of
from quire.errors import ConfigError

Function = Callable[..., Any]
REFUSED = "The user does not want this to be run."


class LocalTools:
    """The functions, by their names.

    Args:
        confirm: asks the user whether a call may run, which it is given as text.
    """

    def __init__(self, functions: Iterable[Function], confirm: Callable[[str], bool]) -> None:
        self._functions: dict[str, Function] = {}
        for function in functions:
            if function.__name__ in self._functions:
                raise ConfigError(f"--tool: two functions are called {function.__name__}")
            self._functions[function.__name__] = function
        self.described = [tool_of(function) for function in self._functions.values()]
        self._confirm = confirm

    def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message with the result of a call, which is one of a message's `tool_calls`."""
        function = call["function"]
        content = self._result(function["name"], function["arguments"])
        return {"role": "tool", "tool_call_id": call["id"], "content": content}

    def _result(self, name: str, arguments_text: str) -> str:
        function = self._functions.get(name)
        if function is None:
            return f"Error: there is no tool {name}; there are: {', '.join(self._functions)}"
        try:
            arguments = json.loads(arguments_text or "{}")
            inspect.signature(function).bind(**arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return f"Error: {name} cannot be called with these arguments: {error}"
        if not self._confirm(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"):
            return REFUSED
        return _run(function, arguments)


def _run(function: Function, arguments: Mapping[str, Any]) -> str:
    try:
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except Exception as error:  # of the user's function; the model is told
        return f"Error: {type(error).__name__}: {error}"


def find_functions(names: Iterable[str]) -> list[Function]:
    """What the `--tool` flags name.

    Args:
        names: each `module:function`, `file.py:function`, or `file.py` for all its public functions.

    Raises:
        ConfigError: there is nothing of the name, or its module fails.
    """
    return [function for name in names for function in _functions(name)]


def _functions(name: str) -> list[Function]:
    place, colon, attribute = name.rpartition(":")
    if not colon:
        place, attribute = name, ""
    if not place or not (attribute or place.endswith(".py")):
        raise ConfigError(f"--tool must be module:function or a file that ends with .py, got {name!r}")
    module = _module(place)
    if not attribute:
        return _public(module, place)
    function = getattr(module, attribute, None)
    if not inspect.isfunction(function):
        raise ConfigError(f"--tool {name}: {place} has no function {attribute!r}")
    return [function]


def _public(module: ModuleType, place: str) -> list[Function]:
    """The functions that a file itself defines, in its order."""
    found: list[Function] = [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not found:
        raise ConfigError(f"--tool {place}: the file has no public function")
    return found


def _module(place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"--tool {place}: {type(error).__name__}: {error}") from error


def _imported(name: str) -> ModuleType:
    """A module, of the current directory, too, as `python -m` would find it."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError("no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where annotations and dataclasses look for it
    spec.loader.exec_module(module)
    return module
