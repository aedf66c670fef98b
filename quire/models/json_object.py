# SPDX-License-Identifier: Apache-2.0
"""Typed access to an untrusted JSON object.

Invariant: a returned value has the type and limits that the caller named; everything else raises an error that names
file, key, value and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.errors import ModelLoadError, StartupError, UnsupportedModelError
from quire.models.checkpoint_files import has_file, read_text

_REQUIRED: Any = object()


class JsonObject:
    """One JSON object; `where` names it in messages. A key whose value is null counts as absent.

    `aliases` maps the keys that callers use to those of this file. Unsupported options, and malformed values with a
    fallback, are appended to `refused`, so that the reader can report all of them at once; without that list they are
    raised. `asked` are the keys that were read.
    """

    def __init__(
        self,
        where: str,
        values: dict[str, Any],
        aliases: Mapping[str, str] = MappingProxyType({}),
        refused: list[StartupError] | None = None,
    ) -> None:
        self.where = where
        self.values = values
        self.aliases = aliases
        self.refused = refused
        self.asked: set[str] = set()

    def with_aliases(self, aliases: Mapping[str, str]) -> JsonObject:
        """Return the same object for callers that use another file's keys."""
        return self._like(self.values, aliases)

    def with_values(self, **values: Any) -> JsonObject:
        """Return the object with some values replaced, by their keys in the file."""
        return self._like({**self.values, **values}, self.aliases)

    def _like(self, values: dict[str, Any], aliases: Mapping[str, str]) -> JsonObject:
        other = JsonObject(self.where, values, aliases, self.refused)
        other.asked = self.asked
        return other

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the unchecked value, None if absent."""
        name = self.aliases.get(key, key)
        self.asked.add(name)
        return self.values.get(name)

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = 2**31 - 1) -> int:
        """Return an integer in [low, high]."""
        return int(self._checked(key, default, int, f"an integer in [{low}, {high}]", low, high))

    def number(self, key: str, default: Any = _REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        """Return a finite number in [low, high]."""
        return float(self._checked(key, default, (int, float), f"a number in [{low:g}, {high:g}]", low, high))

    def optional_integer(self, key: str, *, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """Return `integer(key)`; None if absent."""
        return self.integer(key, low=low, high=high) if key in self else None

    def optional_number(self, key: str, *, low: float = 0.0, high: float = 1e12) -> float | None:
        """Return `number(key)`; None if absent."""
        return self.number(key, low=low, high=high) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._checked(key, default, bool, "true or false"))

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return str(self._checked(key, default, str, "a string"))

    def choice(self, key: str, allowed: Sequence[str], default: Any = _REQUIRED) -> str:
        """Return a string of `allowed`; refuse others."""
        value = self.text(key, default)
        if value not in allowed:
            self.refuse(key, f"one of {', '.join(allowed)}")
            return allowed[0]
        return value

    def only(self, key: str, *values: Any) -> None:
        """Refuse an option that is present with any value but these, with which it has no effect."""
        if key in self and self.get(key) not in values:
            self.refuse(key, " or ".join(["absent", *map(_shown, values)]))

    def knows(self, *keys: str) -> None:
        """Refuse all other keys: they may ask for something unsupported."""
        for key in sorted(self.values.keys() - set(keys)):
            self.only(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers."""
        items = self._checked(key, _REQUIRED, list, "a list of numbers")
        kinds = set(map(type, items))  # a vocabulary has hundreds of thousands
        if kinds - {int, float} or not all(map(math.isfinite, items)):
            raise self.wrong(key, "a list of numbers")
        return tuple(map(float, items))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        items = self._checked(key, _REQUIRED, list, "a list of strings")
        if set(map(type, items)) - {str}:
            raise self.wrong(key, "a list of strings")
        return tuple(items)

    def child(self, key: str) -> JsonObject:
        """Return a JSON object; an empty one if absent."""
        values = self._checked(key, {}, dict, "a JSON object")
        return JsonObject(f"{self.where}: {key}", values, refused=self.refused)

    def children(self, key: str) -> list[JsonObject]:
        """Return a list of JSON objects."""
        items = self._checked(key, _REQUIRED, list, "a list of JSON objects")
        if not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, "a list of JSON objects")
        return [
            JsonObject(f"{self.where}: {key}[{index}]", item, refused=self.refused)
            for index, item in enumerate(items)
        ]

    def refuse(self, key: str, allowed: str) -> None:
        """Record a well-formed value that asks for something unsupported.

        Raises:
            UnsupportedModelError: no list of refusals is kept.
        """
        if self.refused is None:
            raise self.unsupported(key, allowed)
        self.refused.append(self.unsupported(key, allowed))

    def wrong(self, key: str, allowed: str) -> ModelLoadError:
        """Return the error for a key whose value is missing or malformed."""
        name = self.aliases.get(key, key)
        if key not in self:
            return ModelLoadError(f"{self.where}: key {name!r} is missing; it must be {allowed}")
        return ModelLoadError(f"{self.where}: {name} must be {allowed}, got {_shown(self.get(key))}")

    def unsupported(self, key: str, allowed: str) -> UnsupportedModelError:
        """Return the error for a well-formed value that asks for something unsupported."""
        name, shown = self.aliases.get(key, key), _shown(self.get(key))
        return UnsupportedModelError(f"{self.where}: {name} = {shown} is not supported; it must be {allowed}")

    def _checked(
        self,
        key: str,
        default: Any,
        kind: type | tuple[type, ...],
        allowed: str,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> Any:
        if key not in self and default is not _REQUIRED:
            return default
        value = self.get(key)
        is_kind = _is_a(value, kind)
        if is_kind and not (isinstance(value, int | float) and not low <= value <= high):
            return value
        if self.refused is None or not (is_kind or _is_a(default, kind)):
            raise self.wrong(key, allowed)
        self.refused.append(self.wrong(key, allowed))
        return min(max(value, low), high) if is_kind else default


def read_json_object(path: Path) -> JsonObject:
    """Read the JSON object in a file.

    Raises:
        ModelLoadError: the file is missing, no regular file, unreadable, too large, or holds no JSON object.
    """
    values = _read_json(path)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {_shown(values)}")
    return JsonObject(str(path), values)


def optional_json_object(path: Path) -> JsonObject:
    """Read the JSON object in a file; return an empty one if there is no file."""
    return read_json_object(path) if has_file(path) else JsonObject(str(path), {})


def read_json_objects(path: Path) -> list[JsonObject]:
    """Read the JSON list of objects in a file; raises as `read_json_object` does."""
    values = _read_json(path)
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise ModelLoadError(f"{path}: must hold a JSON list of objects, got {_shown(values)}")
    return [JsonObject(f"{path}: {index}", one) for index, one in enumerate(values)]


def _read_json(path: Path) -> Any:
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return isinstance, with true and false not counting as numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 100 else f"{text[:100]}..."
