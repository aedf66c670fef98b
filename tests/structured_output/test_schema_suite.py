# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema Test Suite (draft 2020-12): a schema is refused with a reason, or kept to exactly.

`suite/` has its cases as they are published. An instance that is valid may be written in several ways, of which a
grammar takes one: keys in the schema's order, and 1 rather than 1.0.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from quire.errors import ValidationError
from quire.structured_output.backend import Grammar, GrammarBackend, GrammarError, Masks
from quire.structured_output.backends import BACKENDS
from quire.structured_output.normalize import normalize
from quire.structured_outputs_params import StructuredOutputsParams, StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from tests.fixtures.folded import folded

SUITE = Path(__file__).parent / "suite"
FILES = sorted(SUITE.rglob("*.json"))
NAMES = [str(path.relative_to(SUITE).with_suffix("")) for path in FILES]
LEAP_SECONDS = {
    "1998-12-31T15:59:60.123-08:00",
    "01:29:60+01:30",
    "23:29:60+23:30",
    "15:59:60-08:00",
    "00:29:60-23:30",
}
"""Valid and not taken: the 60th second of a minute is taken where the time is written in UTC only."""
ANNOTATIONS = "format"
"""The file in which a format says nothing about a string; here it does, as the `optional/format` files have it."""
MAX_FORMS = 300

Verdict = Literal["refused", "exact", "wrong"]
VOCABULARY = Vocabulary.from_bytes()
backends = {name: BACKENDS.resolve(name)(VOCABULARY) for name in ("guidance", "xgrammar")}


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def compiled(backend: GrammarBackend, schema: Any) -> Grammar:
    params = StructuredOutputsParams(json=compact(schema), whitespace_pattern="")
    grammar = backend.compile(normalize(params, StructuredOutputsSettings()))
    grammar.new_matcher().fill(Masks(1, 257), 0)
    return grammar


def takes(grammar: Grammar, text: str) -> bool:
    matcher = grammar.new_matcher()
    return all(map(matcher.advance, text.encode())) and matcher.may_end


def forms(value: Any) -> Iterator[Any]:
    """The ways in which a value can be written."""
    if isinstance(value, dict):
        for items in itertools.permutations(value.items()):
            for inner in itertools.product(*(list(forms(one)) for _, one in items)):
                yield {name: one for (name, _), one in zip(items, inner, strict=True)}
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(forms(one)) for one in value)))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() else value


def is_right(grammar: Grammar, instance: Any, *, is_valid: bool) -> bool:
    if not is_valid:
        return not takes(grammar, compact(instance))
    return any(takes(grammar, compact(form)) for form in itertools.islice(forms(instance), MAX_FORMS))


def verdict(backend: GrammarBackend, name: str, group: dict[str, Any]) -> Verdict:
    try:
        grammar = compiled(backend, group["schema"])
    except (ValidationError, GrammarError):
        return "refused"
    cases = [
        case
        for case in group["tests"]
        if not (case["valid"] and (case["data"] in LEAP_SECONDS if isinstance(case["data"], str) else False))
        and not (name == ANNOTATIONS and "only an annotation" in case["description"])
    ]
    is_exact = all(is_right(grammar, case["data"], is_valid=case["valid"]) for case in cases)
    return "exact" if is_exact else "wrong"


@functools.cache
def verdicts(backend: str, name: str) -> list[tuple[str, Verdict]]:
    """The groups of a file, each with what becomes of it."""
    groups = json.loads((SUITE / f"{name}.json").read_text())
    return [(group["description"], verdict(backends[backend], name, group)) for group in groups]


@folded("name", NAMES)
@folded("backend", backends)
def test_no_schema_is_kept_to_wrongly(backend: str, name: str) -> None:
    assert [description for description, became in verdicts(backend, name) if became == "wrong"] == []


def test_the_documented_counts_are_those_of_the_suite() -> None:
    """docs/structured_output.md; `python -m tests.structured_output.test_schema_suite` writes the table."""
    page = (Path(__file__).parents[2] / "docs/structured_output.md").read_text()
    assert table() in page


def table() -> str:
    lines = ["| file of the suite | kept to | refused | by xgrammar: kept to |", "|---|---:|---:|---:|"]
    total: Counter[str] = Counter()
    for name in NAMES:
        found, other = (Counter[str](became for _, became in verdicts(each, name)) for each in backends)
        found["other"] = other["exact"]
        total += found
        lines.append(_row(name, found))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, found: Counter[str]) -> str:
    return f"| {name} | {found['exact']} | {found['refused']} | {found['other']} |"


if __name__ == "__main__":
    print(table())
