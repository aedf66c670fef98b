# SPDX-License-Identifier: Apache-2.0
"""Cases that quire-demo is judged by: held-out phrasings and operand pairs, per category.

Invariant: nothing here was in training; the "unseen" rows add names and cities that were not either.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo_model import data, facts, phrases, tools
from demo_model.messages import Message, say, without_thoughts

Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class Case:
    """A conversation whose next reply is judged."""

    category: str
    messages: list[Message]
    expected: str
    tools: Tools = None
    thinks: bool = False


def system(rng: random.Random) -> list[Message]:
    """Half of the cases have a system prompt, often one never seen."""
    prompts = (*phrases.HELD_SYSTEM_PROMPTS, "You are a helpful assistant.")
    return [say("system", rng.choice(prompts))] if rng.random() < 0.5 else []


def case(
    category: str,
    messages: list[Message],
    tools: Tools = None,
    head: list[Message] | None = None,
    thinks: bool = False,
) -> Case:
    """Cut the last reply off; tool calls are expected in their rendered form.  No history has thoughts."""
    *before, last = without_thoughts(messages)
    return Case(category, (head or []) + before, last["content"] or calls_text(last), tools, thinks)


def calls_text(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def fact_cases(rng: random.Random) -> list[Case]:
    """Every fact once, in a held-out phrasing."""
    return [case("facts", data.fact_turn(rng, True, relation, subject), head=system(rng))
            for relation in facts.RELATIONS for subject in relation.table]  # fmt: skip


def call_cases(rng: random.Random, name: str, kind: tools.Kind) -> list[Case]:
    """A call and the answer to its result."""
    offered, head = tools.offered(rng, kind), system(rng)
    messages = tools.exchange(rng, True, tools.keys_of(offered), tools.ask_one(rng, True, kind))
    return [
        case(f"{name} call", messages[:2], offered, head),
        case(f"{name} answer", messages, offered, head),
    ]


def two_calls_cases(rng: random.Random) -> list[Case]:
    """Two calls at once and the answer to their results."""
    offered, head = tools.offered(rng), system(rng)
    keys = tools.keys_of(offered)
    messages = tools.exchange(rng, True, keys, tools.ask_several(rng, True, keys))
    return [case("two calls", messages[:2], offered, head), case("two answers", messages, offered, head)]


def unseen_city_case(rng: random.Random) -> Case:
    offered = tools.offered(rng, tools.WEATHER)
    asked = tools.ask_one(rng, True, tools.WEATHER, unseen=True)
    messages = tools.exchange(rng, True, tools.keys_of(offered), asked)
    return case("tool, unseen cities", messages[:2], offered, system(rng))


def no_call_case(rng: random.Random, index: int) -> Case:
    """The tool is not offered: say so.  A tool, but another question: just answer."""
    if index % 2:
        offered = [tools.other(rng)] if rng.random() < 0.3 else None
        asked = tools.ask_one(rng, True, rng.choice((tools.WEATHER, tools.TIME)))
        return case("tool not offered", tools.exchange(rng, True, {}, asked), offered, system(rng))
    messages = data.exchange(rng, True, rng.choice(("facts", "arithmetic", "json", "talk")), {})
    return case("tool not needed", messages, tools.offered(rng), system(rng))


def chat_case(rng: random.Random) -> Case:
    """The last turn of a dialogue of two to five exchanges that mixes everything."""
    offered = tools.offered(rng) if rng.random() < 0.4 else None
    chosen = rng.choices(data.CATEGORIES, data.WEIGHTS, k=rng.randrange(2, 6))
    messages = system(rng)
    for category in chosen:
        messages += data.exchange(rng, True, category, tools.keys_of(offered))
    return case("dialogue", messages, offered)


def thinking_case(rng: random.Random) -> Case:
    """One exchange of any kind, answered with a thought before the answer, or before the calls."""
    category = rng.choice(data.CATEGORIES)
    offered = tools.offered(rng) if category == "tool" or rng.random() < 0.2 else None
    messages = data.exchange(rng, True, category, tools.keys_of(offered))
    cut = 2 if rng.random() < 0.5 else len(messages)
    return case("thinking", messages[:cut], offered, system(rng), thinks=True)


def cases(seed: int, limit: int) -> list[Case]:
    """The whole evaluation; `limit` caps each category (0: no cap)."""
    rng = random.Random(seed)
    found = fact_cases(rng)
    found += [case("arithmetic", data.arithmetic(rng, True), head=system(rng)) for _ in range(400)]
    found += [case("json", data.extraction(rng, True), head=system(rng)) for _ in range(200)]
    found += [
        case("json, unseen names", data.extraction(rng, True, True), head=system(rng)) for _ in range(100)
    ]
    for _ in range(100):
        found += [*call_cases(rng, "tool", tools.WEATHER), unseen_city_case(rng)]
        found += call_cases(rng, "second tool", tools.TIME) + two_calls_cases(rng)
    found += [no_call_case(rng, index) for index in range(200)]
    found += [case("small talk", data.small_talk(rng, True), head=system(rng)) for _ in range(200)]
    found += [chat_case(rng) for _ in range(200)]
    found += [thinking_case(rng) for _ in range(200)]
    return [
        one
        for group in by_category(found).values()
        for one in (rng.sample(group, min(limit, len(group))) if limit else group)
    ]


def by_category(found: list[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for one in found:
        groups.setdefault(one.category, []).append(one)
    return groups
