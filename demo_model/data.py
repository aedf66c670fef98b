# SPDX-License-Identifier: Apache-2.0
"""The deterministic generator of training dialogues and held-out cases.

Invariant: with `held=True` only held-out phrasings, prefixes, operand pairs (and, on request
unseen names) are used;
with `held=False` none of them ever is.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from demo_model import facts, phrases, talk, tools, values
from demo_model.messages import Message, roughen, say, without_thoughts

CATEGORIES = ("facts", "arithmetic", "json", "tool", "talk")
WEIGHTS = (0.25, 0.17, 0.22, 0.23, 0.13)
SUMS_SHARE, COPY_SHARE = 0.06, 0.12
COUNTRIES = tuple(facts.CAPITALS)
# Small relations need no fewer repetitions per fact; the square root keeps the small ones from vanishing.
RELATION_WEIGHTS = [len(relation.table) ** 0.8 for relation in facts.RELATIONS]


@dataclass(frozen=True)
class Dialogue:
    """Messages (every assistant one is trained on, or just what follows an "=") and the tools offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    results_only: bool = False


def fact_turn(rng: random.Random, held: bool, relation: facts.Relation, subject: str) -> list[Message]:
    """One question about a fact and its answer."""
    nouns, asked = (relation.held_noun, relation.held_asked) if held else (relation.noun, relation.asked)
    if held:  # a known noun phrase in an unseen frame, the other way round, or an unseen question
        frames, nouns = rng.choice(((phrases.HELD_FRAMES, relation.noun), (phrases.FRAMES, nouns)))
    else:
        frames = phrases.FRAMES
    question = (
        rng.choice(asked) if rng.random() < 0.5 else rng.choice(frames).replace("{np}", rng.choice(nouns))
    )
    question = with_article(question.format(x=subject))
    question = roughen(question[0].upper() + question[1:], rng, held)
    answer = with_article(relation.answer.format(x=subject, y=relation.table[subject]))
    thought = with_article(f"The user asks for {relation.noun[0].format(x=subject)}.")
    return [say("user", question), say("assistant", answer[0].upper() + answer[1:], thought)]


def with_article(text: str) -> str:
    """ "a owl" becomes "an owl"."""
    return re.sub(r"\b([Aa]) (?=(?:ant|owl)\b)", r"\1n ", text)


def fact(rng: random.Random, held: bool) -> list[Message]:
    relation = rng.choices(facts.RELATIONS, RELATION_WEIGHTS)[0]
    return fact_turn(rng, held, relation, rng.choice(list(relation.table)))


def is_held_pair(a: int, b: int, sign: str) -> bool:
    """One in eight operand pairs is held out, by a fixed rule."""
    return (a * 7919 + b * 104729 + (sign == "-") * 31) % 97 % 8 == 0


def arithmetic(rng: random.Random, held: bool) -> list[Message]:
    while True:
        a, b, sign = rng.randrange(100), rng.randrange(100), rng.choice("+-")
        if is_held_pair(a, b, sign) == held:
            break
    lists = (phrases.HELD_ADD, phrases.HELD_SUB) if held else (phrases.ADD, phrases.SUB)
    form = rng.choice(lists[sign == "-"])
    if not held and rng.random() < 0.25:
        form = f"{{a}} {sign} {{b}}"
    question = roughen(form.format(a=a, b=b), rng, held)
    total, tens, ones = (
        x + y if sign == "+" else x - y for x, y in ((a, b), (a // 10, b // 10), (a % 10, b % 10))
    )
    thought = (
        f"The tens make {tens} and the ones make {ones}."  # no sum of other operands: those may be held out
    )
    return [say("user", question), say("assistant", f"{a} {sign} {b} = {total}.", thought)]


def field_values(rng: random.Random, held: bool, unseen: bool) -> dict[str, Any]:
    """A value for every key of every schema."""
    return {
        "name": values.person(rng, held, unseen), "person": values.person(rng, held, unseen),
        "city": values.place(rng, held, unseen),
        "age": rng.randrange(3, 100), "item": rng.choice(values.ITEMS), "quantity": rng.randrange(2, 100),
        "price": rng.randrange(1, 200), "event": rng.choice(values.EVENTS),
        "date": f"{rng.randrange(1, 32)} {rng.choice(values.MONTHS)}" if rng.random() < 0.6
        else f"{rng.choice(values.MONTHS)} {rng.randrange(1, 32)}",
    }  # fmt: skip


def list_fields(keys: list[str], rng: random.Random) -> str:
    if len(keys) == 1:
        return rng.choice(("the ", "")) + keys[0]
    head, joint = ", ".join(keys[:-1]), rng.choice((" and ", " and ", ", "))
    return rng.choice(("the ", "", "")) + head + joint + keys[-1]


def extraction(rng: random.Random, held: bool, unseen: bool = False) -> list[Message]:
    schema_keys, seen_sentences, held_sentences = rng.choice(phrases.SCHEMAS)
    known = field_values(rng, held, unseen)
    sentence = rng.choice(held_sentences if held else seen_sentences).format(**known)
    keys = list(schema_keys)
    if rng.random() < 0.35:
        keys = rng.sample(keys, rng.choice((1, 2, 2, 3)))
    form = rng.choice(phrases.HELD_EXTRACT if held else phrases.EXTRACT)
    request = form.format(f=list_fields(keys, rng), s=sentence)
    answer = json.dumps({key: known[key] for key in keys}, ensure_ascii=False)
    return [say("user", request), say("assistant", answer, f"The user wants JSON with {', '.join(keys)}.")]


def small_talk(rng: random.Random, held: bool) -> list[Message]:
    if rng.random() < 0.4:
        return [
            say("user", unknown_question(rng, held)),
            say("assistant", talk.UNKNOWN_REPLY, talk.UNKNOWN_THOUGHT),
        ]
    intent = rng.choice(talk.INTENTS)
    text = rng.choice(intent.held if held else intent.said)
    if rng.random() < 0.5:
        text += rng.choice(".!?")
    if rng.random() < 0.25:
        text = text.lower()
    return [say("user", text), say("assistant", rng.choice(intent.replies), intent.thought)]


def unknown_question(rng: random.Random, held: bool) -> str:
    form = rng.choice(talk.HELD_UNKNOWN if held else talk.UNKNOWN)
    name = f"{values.made_up(rng)} {values.made_up(rng)}" if rng.random() < 0.5 else values.made_up(rng)
    topic = rng.choice(talk.TOPICS if not held or rng.random() < 0.5 else talk.HELD_TOPICS)
    form = re.sub(r"\{d\}", lambda _: str(rng.randrange(10)), form)
    return roughen(form.format(t=topic, n=name, k=rng.choice(COUNTRIES)), rng, held)


def exchange(rng: random.Random, held: bool, category: str, keys: dict[str, str]) -> list[Message]:
    """One exchange of a category, its thoughts with it."""
    if category == "tool":
        return tools.exchange(rng, held, keys, tools.ask(rng, held, keys))
    plain = {"facts": fact, "arithmetic": arithmetic, "json": extraction, "talk": small_talk}
    return plain[category](rng, held)


def sums_drill(rng: random.Random) -> Dialogue:
    """A sheet of sums: the digits need far more examples than the phrasings do, and here they are dense."""
    sums = [arithmetic(rng, False)[-1]["content"] for _ in range(rng.randrange(4, 40))]
    return Dialogue([say("assistant", "\n".join(sums))], results_only=True)


def copy_drill(rng: random.Random) -> Dialogue:
    """Repeat made-up words: copying what was just read is what JSON and tool calls rest on."""
    messages: list[Message] = []
    for _ in range(rng.randrange(2, 5)):
        words = " ".join(
            rng.choice((values.made_up, values.made_up_place))(rng) for _ in range(rng.randrange(1, 9))
        )
        messages += [say("user", rng.choice(phrases.REPEAT).format(words=words)), say("assistant", words)]
    return Dialogue(messages)


def dialogue(rng: random.Random) -> Dialogue:
    """A training dialogue: a drill, or one to six exchanges, with or without system prompt, tools and thoughts."""
    roll = rng.random()
    if roll < SUMS_SHARE + COPY_SHARE:
        return sums_drill(rng) if roll < SUMS_SHARE else copy_drill(rng)
    turns = rng.choices((1, 2, 3, 4, 5, 6), (30, 18, 18, 14, 10, 10))[0]
    chosen = rng.choices(CATEGORIES, WEIGHTS, k=turns)
    if rng.random() < 0.25:  # a run of one kind, as people do
        chosen = [chosen[0]] * turns
    offered = None
    if ("tool" in chosen and rng.random() < 0.75) or rng.random() < 0.04:
        offered = tools.offered(rng) if rng.random() < 0.95 else [tools.other(rng)]
    thinking = rng.choice((0.0, 0.0, 0.0, 0.5, 0.9))
    messages = [say("system", rng.choice(phrases.SYSTEM_PROMPTS))] if rng.random() < 0.4 else []
    for category in chosen:
        turn = exchange(rng, False, category, tools.keys_of(offered))
        messages += turn if rng.random() < thinking else without_thoughts(turn)
    return Dialogue(messages, offered)


def dialogues(seed: int) -> Iterator[Dialogue]:
    """The endless training stream of a seed."""
    rng = random.Random(seed)
    while True:
        yield dialogue(rng)
