"""The rules of one grammar."""

from __future__ import annotations

from quire.structured_output.backend import GrammarError


def refusal(what: str) -> GrammarError:
    """How something is refused that the other backend may keep to."""
    return GrammarError(f"the xgrammar backend does not keep to {what}; the guidance backend may")


class Rules:
    """Rules by name, of which no two have the same body."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def define(self, body: str) -> str:
        """The name of the rule of that body."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self._bodies[self._names[body]] = body
        return self._names[body]

    def reserve(self) -> str:
        """A name whose rule is to come, with `complete`: others may go on and refer to it."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        return name

    def complete(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def grammar(self, start: str) -> str:
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": start, **self._bodies}.items())
