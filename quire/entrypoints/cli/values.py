"""The kinds of values that flags take beyond click's own.

Invariant: each accepts what it returns, because values from a config file arrive already typed.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

import click

_INTEGER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {unit: 1000 ** (power + 1) for power, unit in enumerate("kmgt")}
_UNITS |= {unit: 1024 ** (power + 1) for power, unit in enumerate("KMGT")}
_UNITS[""] = 1


class HumanInt(click.ParamType[int]):
    """An integer; k, m, g, t multiply by powers of 1000 and K, M, G, T by powers of 1024: 2k, 4K, 2.5m.

    `words` stand for numbers.
    """

    name = "integer"

    def __init__(self, minimum: int | None = None, words: tuple[tuple[str, int], ...] = ()) -> None:
        self.minimum = minimum
        self.words = dict(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = self._number(value, param, ctx)
        if self.minimum is not None and number < self.minimum:
            self.fail(f"{value!r} is less than {self.minimum}", param, ctx)
        return number

    def _number(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value in self.words:
            return self.words[value]
        match = _INTEGER.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is not an integer (1k is 1000, 1K is 1024)", param, ctx)
        exact = Fraction(match[1]) * _UNITS[match[2]]
        if exact.denominator != 1:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        return int(exact)


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object such as {"temperature": 0.5}."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except (TypeError, ValueError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return parsed


class Rate(click.ParamType[float]):
    """Requests per second, more than 0; `inf` is as fast as possible."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            rate = float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not a number", param, ctx)
        if not rate > 0:
            self.fail(f"{value!r} is not greater than 0", param, ctx)
        return rate
