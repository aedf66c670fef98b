# SPDX-License-Identifier: Apache-2.0
"""Random JSON schemas whose values are short."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ["name", "age", "città", 'a "quoted" one', "x/y", "tags", "is_ok", "日本", "back\\slash"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
PATTERNS = ["^[A-Z][a-z]{1,4}$", "^\\d{3}-\\d{2}$", "^(?:yes|no)$", '^[^\\s"]{2,5}$', "^\\w+é?$"]


class RandomSchemas:
    """Schemas drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def draw(self) -> Schema:
        """An object, with definitions of which some refer to others."""
        self._defs: dict[str, Schema] = {}
        root = self._object(3)
        return {**root, "$defs": self._defs} if self._defs else root

    def _any(self, depth: int) -> Schema:
        flat: list[Callable[[int], Schema]] = [self._text, self._text, self._number, self._number, self._enum]
        deep: list[Callable[[int], Schema]] = [self._object, self._array, self._either, self._reference]
        return self._rng.choice([*flat, *(deep if depth > 0 else [])])(depth)

    def _text(self, _: int) -> Schema:
        least = self._rng.randrange(4)
        return self._rng.choice(
            [
                {"type": "string", "minLength": least, "maxLength": least + self._rng.randrange(6)},
                {"type": "string", "format": self._rng.choice(FORMATS)},
                {"type": "string", "pattern": self._rng.choice(PATTERNS), "maxLength": 12},
            ]
        )

    def _number(self, _: int) -> Schema:
        low = self._rng.randrange(-50, 50)
        high = low + self._rng.randrange(200)
        return self._rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": high},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
                {"type": "integer", "minimum": 0, "maximum": 999, "multipleOf": self._rng.choice([2, 5, 7])},
                {"type": "number", "minimum": low, "maximum": high + 0.5},
                {"type": ["boolean", "null"]},
            ]
        )

    def _enum(self, _: int) -> Schema:
        values: list[Any] = [1, 2.5, None, True, "é", 'q"', "\n", {"k": [1, "v"]}, []]
        return self._rng.choice(
            [{"enum": self._rng.sample(values, self._rng.randint(1, 4))}, {"const": self._rng.choice(values)}]
        )

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth - 1) for name in names},
            "required": self._rng.sample(names, self._rng.randint(0, len(names))),
            "additionalProperties": False,
        }
        if self._rng.random() < 0.2:
            schema = {
                "type": "object",
                "additionalProperties": self._any(depth - 1),
                "propertyNames": {"enum": names},
                "maxProperties": 3,
            }
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._rng.randrange(3)
        schema = {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": least + 2}
        if self._rng.random() < 0.3:
            schema |= {
                "prefixItems": [self._any(0), self._any(0)],
                "items": False,
                "maxItems": 2,
                "minItems": 2,
            }
        return schema

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1), self._any(depth - 1)]}

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}
        self._defs[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}
