"""Ranges of whole numbers in the EBNF of xgrammar, digit by digit.

Invariant: a number has one spelling: no zeros in front, and 0 has no sign.
"""

from __future__ import annotations


def integers(low: int | None, high: int | None) -> str:
    """The body of a rule for the numbers from `low` to `high`, both included; None is no bound."""
    assert low is None or high is None or low <= high
    parts = []
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        parts.append(f'"-" ({_naturals(max(1, -(high or 0)), None if low is None else -low)})')
    return " | ".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """Those of each number of digits."""
    least, most = len(str(low)), len(str(low if high is None else high))
    parts = []
    for size in range(least, most + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = 10**size - 1 if high is None else min(high, 10**size - 1)
        parts.append(_between(str(first), str(last)))
    if high is None:
        parts.append(f"[1-9] [0-9]{{{least},}}")
    return " | ".join(parts)


def _between(low: str, high: str) -> str:
    """Digits from `low` to `high`, which have the same number of them."""
    if low[:1] == high[:1]:
        return f'"{low[0]}" {_between(low[1:], high[1:])}' if low else '""'
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if low[1:] == "0" * rest and high[1:] == "9" * rest:
        return f"[{first}-{last}] {_any(rest)}"
    parts = [f'"{first}" {_between(low[1:], "9" * rest)}', f'"{last}" {_between("0" * rest, high[1:])}']
    if first + 1 < last:
        parts.append(f"[{first + 1}-{last - 1}] {_any(rest)}")
    return f"({' | '.join(parts)})"


def _any(size: int) -> str:
    return f"[0-9]{{{size},{size}}}" if size else '""'
