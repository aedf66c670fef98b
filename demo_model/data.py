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

from demo_model import facts, phrases, talk, values

Message = dict[str, Any]
CATEGORIES = ("facts", "arithmetic", "json", "tool", "talk")
WEIGHTS = (0.28, 0.20, 0.22, 0.15, 0.15)
KNOWN_CITIES = tuple(dict.fromkeys((*facts.CAPITALS.values(), *values.CITIES)))
COUNTRIES = tuple(facts.CAPITALS)
# Small relations need no fewer repetitions per fact; the square root keeps the small ones from vanishing.
RELATION_WEIGHTS = [len(relation.table) ** 0.8 for relation in facts.RELATIONS]


FIRST_WORD = re.compile(r"^(What|Which|Who|How|Tell|Is|Can|Give|Name)\b")


@dataclass(frozen=True)
class Dialogue:
    """Messages (every assistant one is trained on, or just what follows an "=") and the tools offered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    results_only: bool = False


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def roughen(text: str, rng: random.Random, held: bool = False, lower: bool = True) -> str:
    """Type a question as people do: prefixes, politeness, missing marks, lower case, no apostrophes."""
    if rng.random() < 0.25:
        prefix = rng.choice(phrases.HELD_PREFIXES if held else phrases.PREFIXES)
        # Only ordinary question words lose their capital after a comma.
        text = prefix + (FIRST_WORD.sub(lambda m: m[0].lower(), text) if prefix.endswith(", ") else text)
    roll = rng.random()
    if roll < 0.12:
        text = text.rstrip(".?!") + rng.choice(phrases.HELD_SUFFIXES if held else phrases.SUFFIXES)
    elif roll < 0.35:
        text = text.rstrip(".?!")
    if rng.random() < 0.05:
        text = text.replace("'", "")
    return text.lower() if lower and rng.random() < 0.2 else text


def with_article(text: str) -> str:
    """ "a owl" becomes "an owl"."""
    return re.sub(r"\b([Aa]) (?=(?:ant|owl)\b)", r"\1n ", text)


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
    return [say("user", question), say("assistant", answer[0].upper() + answer[1:])]


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
    return [say("user", question), say("assistant", f"{a} {sign} {b} = {a + b if sign == '+' else a - b}.")]


def person_name(rng: random.Random, held: bool, unseen: bool) -> str:
    if unseen:
        return rng.choice(values.HELD_NAMES)
    return values.made_up(rng) if not held and rng.random() < 0.45 else rng.choice(values.NAMES)


def place(rng: random.Random, held: bool, unseen: bool) -> str:
    if unseen:
        return rng.choice(values.HELD_CITIES)
    return values.made_up_place(rng) if not held and rng.random() < 0.45 else rng.choice(KNOWN_CITIES)


def field_values(rng: random.Random, held: bool, unseen: bool) -> dict[str, Any]:
    """A value for every key of every schema."""
    return {
        "name": person_name(rng, held, unseen), "person": person_name(rng, held, unseen),
        "city": place(rng, held, unseen),
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
    return [
        say("user", request),
        say("assistant", json.dumps({key: known[key] for key in keys}, ensure_ascii=False)),
    ]


def small_talk(rng: random.Random, held: bool) -> list[Message]:
    if rng.random() < 0.4:
        return [say("user", unknown_question(rng, held)), say("assistant", talk.UNKNOWN_REPLY)]
    intent = rng.choice(talk.INTENTS)
    text = rng.choice(intent.held if held else intent.said)
    if rng.random() < 0.5:
        text += rng.choice(".!?")
    if rng.random() < 0.25:
        text = text.lower()
    return [say("user", text), say("assistant", rng.choice(intent.replies))]


def unknown_question(rng: random.Random, held: bool) -> str:
    form = rng.choice(talk.HELD_UNKNOWN if held else talk.UNKNOWN)
    name = f"{values.made_up(rng)} {values.made_up(rng)}" if rng.random() < 0.5 else values.made_up(rng)
    topic = rng.choice(talk.TOPICS if not held or rng.random() < 0.5 else talk.HELD_TOPICS)
    form = re.sub(r"\{d\}", lambda _: str(rng.randrange(10)), form)
    return roughen(form.format(t=topic, n=name, k=rng.choice(COUNTRIES)), rng, held)


WEATHER_TEXTS = ("Get the weather", "Get the current weather", "Get the current weather for a city",
                 "Weather in a city",
                 "Returns the weather of a city.", "Look up the weather of a city",
                 "The current weather in a given city",
                 "Fetches current weather.", "Get weather information for a location", "")  # fmt: skip
CITY_TEXTS = (
    "The city",
    "City name",
    "Name of the city",
    "The city name, e.g. Paris",
    "city",
    "The name of the city",
    "",
)
OTHER_TOOLS = (("get_time", "Get the time in a city", "city"), ("search", "Search the web", "query"),
               ("calculator", "Evaluate an expression", "expression"), ("send_email", "Send an email", "to"),
               ("get_stock_price", "Get the price of a stock", "symbol"), ("translate",
                "Translate a text", "text"),
               ("get_news", "Get the latest news", "topic"), ("set_alarm", "Set an alarm",
                "time"))  # fmt: skip


def tool(rng: random.Random, name: str, text: str, key: str, key_text: str) -> dict[str, Any]:
    """An OpenAI tool definition; users write them in many shapes."""
    field: dict[str, Any] = {"type": "string"} | ({"description": key_text} if key_text else {})
    properties = {key: field}
    if rng.random() < 0.15:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters = {"type": "object", "properties": properties} | (
        {"required": [key]} if rng.random() < 0.8 else {}
    )
    items = [("name", name)] + ([("description", text)] if text else []) + [("parameters", parameters)]
    if rng.random() < 0.3:
        rng.shuffle(items)
    return {"type": "function", "function": dict(items)}


def weather_tool(rng: random.Random) -> dict[str, Any]:
    key = rng.choices(("city", "location", "place"), (8, 1.5, 0.5))[0]
    return tool(rng, "get_weather", rng.choice(WEATHER_TEXTS), key, rng.choice(CITY_TEXTS))


def other_tool(rng: random.Random) -> dict[str, Any]:
    return tool(rng, *rng.choice(OTHER_TOOLS), rng.choice(("", "The value")))


def offered_tools(rng: random.Random) -> list[dict[str, Any]]:
    """Tools with get_weather among them."""
    tools = [weather_tool(rng)] + ([other_tool(rng)] if rng.random() < 0.25 else [])
    rng.shuffle(tools)
    return tools


def city_key(tools: list[dict[str, Any]] | None) -> str | None:
    """The parameter name of get_weather, or None if it is not offered."""
    for entry in tools or []:
        if entry["function"]["name"] == "get_weather":
            return str(next(iter(entry["function"]["parameters"]["properties"])))
    return None


def weather(rng: random.Random, held: bool, key: str | None, unseen: bool = False) -> list[Message]:
    """A weather question: a call, its result and an answer, or a refusal where no tool is offered."""
    city = place(rng, held, unseen)
    question = rng.choice(phrases.HELD_WEATHER if held else phrases.WEATHER).format(city=city)
    question = roughen(
        question if question[-1] in ".?" else question + "?", rng, held, lower=city in KNOWN_CITIES
    )
    if key is None:
        return [say("user", question), say("assistant", talk.NO_WEATHER_REPLY)]
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {key: city}}}
    degrees, condition = rng.randrange(-15, 41), rng.choice(phrases.CONDITIONS)
    result = rng.choice(phrases.HELD_RESULTS if held else phrases.RESULTS)
    for mark, value in (("{t}", degrees), ("{w}", condition), ("{c}", city), ("{h}", rng.randrange(1, 100))):
        result = result.replace(mark, str(value))
    return [say("user", question), {"role": "assistant", "content": "",
    "tool_calls": [call]}, say("tool", result),
            say("assistant", f"It is {degrees} degrees and {condition} in {city}.")]  # fmt: skip


def exchange(rng: random.Random, held: bool, category: str, key: str | None) -> list[Message]:
    """One exchange of a category."""
    if category == "tool":
        return weather(rng, held, key)
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
        words = " ".join(rng.choice((values.made_up, place_seen))(rng) for _ in range(rng.randrange(1, 5)))
        messages += [say("user", rng.choice(phrases.REPEAT).format(words=words)), say("assistant", words)]
    return Dialogue(messages)


def place_seen(rng: random.Random) -> str:
    return place(rng, False, False)


def dialogue(rng: random.Random) -> Dialogue:
    """A training dialogue: a drill, or one to six exchanges with or without system prompt and tools."""
    roll = rng.random()
    if roll < 0.37:
        return sums_drill(rng) if roll < 0.3 else copy_drill(rng)
    turns = rng.choices((1, 2, 3, 4, 5, 6), (30, 18, 18, 14, 10, 10))[0]
    chosen = rng.choices(CATEGORIES, WEIGHTS, k=turns)
    if rng.random() < 0.25:  # a run of one kind, as people do
        chosen = [chosen[0]] * turns
    tools = None
    if ("tool" in chosen and rng.random() < 0.7) or rng.random() < 0.04:
        tools = offered_tools(rng) if rng.random() < 0.93 else [other_tool(rng)]
    messages = [say("system", rng.choice(phrases.SYSTEM_PROMPTS))] if rng.random() < 0.4 else []
    for category in chosen:
        messages += exchange(rng, False, category, city_key(tools))
    return Dialogue(messages, tools)


def dialogues(seed: int) -> Iterator[Dialogue]:
    """The endless training stream of a seed."""
    rng = random.Random(seed)
    while True:
        yield dialogue(rng)
