"""Free text up to what ends it, as rules of EBNF: a rule for each state of an automaton that looks for several texts.

Source: A. Aho and M. Corasick, "Efficient string matching" (1975).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from quire.structured_output.ebnf.char_sets import WHITE_SPACE, complement, of_text, written
from quire.structured_output.ebnf.rules import Rules

State = tuple[str, bool]
"""What is read of the texts that are looked for, and whether all that was read is white space."""


class Scanner:
    """Text that holds none of `stops` but as its end.

    Args:
        stops: text -> what follows it, or None: then the text may not come.
        anywhere: rules with which the text may go on at any place.
        may_end: whether it may end without any of these.
        not_first: characters with which it does not begin, white space aside.
    """

    def __init__(
        self,
        rules: Rules,
        stops: Mapping[str, str | None],
        anywhere: Sequence[str],
        *,
        may_end: bool,
        not_first: str = "",
    ) -> None:
        self._rules = rules
        self._stops = stops
        self._exits = [*anywhere, *['""'] * may_end]
        self._not_first = not_first
        self._states: dict[State, str] = {}
        self._open: list[State] = []

    def rule(self, name: str) -> None:
        """Write the automaton, of which the rule of that name, which is reserved, is the first state."""
        first: State = ("", bool(self._not_first))
        self._states[first] = name
        self._open.append(first)
        while self._open:
            state = self._open.pop()
            self._rules.complete(self._states[state], " | ".join(self._ways(state)))

    def _ways(self, state: State) -> list[str]:
        read, is_fresh = state
        chars = {char for stop in self._stops for char in stop}
        if is_fresh:
            chars |= {*self._not_first, *WHITE_SPACE}
        ways, classes = [*self._exits], defaultdict(list)
        for char in sorted(chars):
            found = next((stop for stop in self._stops if (read + char).endswith(stop)), None)
            if is_fresh and char in self._not_first:
                continue
            if found is None:
                classes[self._longest(read + char), is_fresh and char in WHITE_SPACE].append(char)
            elif (rest := self._stops[found]) is not None:
                ways.append(f"{written(of_text(char))} {rest}")
        ways += [f"{written(of_text(some))} {self._named(to)}" for to, some in classes.items()]
        return [*ways, f"{written(complement(of_text(chars)))} {self._named(('', False))}"]

    def _longest(self, read: str) -> str:
        """The end of what was read with which one of the texts begins."""
        ends = (read[place:] for place in range(len(read) + 1))
        return next(end for end in ends if any(stop.startswith(end) for stop in self._stops) or not end)

    def _named(self, state: State) -> str:
        if state not in self._states:
            self._states[state] = self._rules.reserve()
            self._open.append(state)
        return self._states[state]
