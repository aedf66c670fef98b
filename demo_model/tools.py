# SPDX-License-Identifier: Apache-2.0
"""The tools of quire-demo: how they are offered, asked for, called and answered.

A question is for one call or for two at once: of two cities, or of both tools for one city.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_model import tool_phrases, values
from demo_model.messages import Message, roughen, say

Tool = dict[str, Any]
Phrasings = tuple[list[str], list[str]]
"""Those of training, and those held out."""


@dataclass(frozen=True)
class Kind:
    """A tool: its function's name, what it is asked for, and the phrasings."""

    name: str
    noun: str
    texts: tuple[str, ...]
    of_one: Phrasings
    of_two: Phrasings
    result: Callable[[random.Random, bool, str], tuple[str, str]]
    """From a city to what the tool returns, and what the model says of it."""

    @property
    def refusal(self) -> str:
        return f"I cannot know the {self.noun}; no {self.noun} tool is offered to me."


Call = tuple[Kind, str]


def filled(form: str, **marks: object) -> str:
    """A form that may hold braces of its own."""
    for name, value in marks.items():
        form = form.replace(f"{{{name}}}", str(value))
    return form


def weather_result(rng: random.Random, held: bool, city: str) -> tuple[str, str]:
    degrees, condition = rng.randrange(-15, 41), rng.choice(tool_phrases.CONDITIONS)
    form = rng.choice(tool_phrases.HELD_RESULTS if held else tool_phrases.RESULTS)
    text = filled(form, t=degrees, w=condition, c=city, h=rng.randrange(1, 100))
    return text, f"It is {degrees} degrees and {condition} in {city}."


def time_result(rng: random.Random, held: bool, city: str) -> tuple[str, str]:
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    form = rng.choice(tool_phrases.HELD_TIME_RESULTS if held else tool_phrases.TIME_RESULTS)
    return filled(form, t=clock, c=city, h=rng.randrange(1, 12)), f"It is {clock} in {city}."


WEATHER = Kind(
    "get_weather", "weather",
    ("Get the weather", "Get the current weather", "Get the current weather for a city", "Weather in a city",
     "Returns the weather of a city.", "Look up the weather of a city", "The current weather in a given city",
     "Fetches current weather.", "Get weather information for a location", ""),
    (tool_phrases.WEATHER, tool_phrases.HELD_WEATHER),
    (tool_phrases.TWO_WEATHERS, tool_phrases.HELD_TWO_WEATHERS),
    weather_result,
)  # fmt: skip
TIME = Kind(
    "get_time", "time",
    ("Get the time in a city", "Get the time", "Get the current time", "Get the current time in a city",
     "Returns the local time of a city.", "Look up the time in a city", "The local time of a given city",
     "Time in a city", "What time it is in a location", ""),
    (tool_phrases.TIME, tool_phrases.HELD_TIME),
    (tool_phrases.TWO_TIMES, tool_phrases.HELD_TWO_TIMES),
    time_result,
)  # fmt: skip
KINDS = {kind.name: kind for kind in (WEATHER, TIME)}
CITY_TEXTS = ("The city", "City name", "Name of the city", "The city name, e.g. Paris", "city",
              "The name of the city", "")  # fmt: skip
OTHER_TOOLS = (("get_population", "Get the number of people of a city", "city"),
               ("search", "Search the web", "query"), ("calculator", "Evaluate an expression", "expression"),
               ("send_email", "Send an email", "to"), ("translate", "Translate a text", "text"),
               ("get_stock_price", "Get the price of a stock", "symbol"),
               ("get_news", "Get the latest news", "topic"), ("set_alarm", "Set an alarm", "time"))  # fmt: skip


def definition(rng: random.Random, name: str, text: str, key: str, key_text: str) -> Tool:
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


def known(rng: random.Random, kind: Kind) -> Tool:
    """A definition of one of the two tools."""
    key = rng.choices(("city", "location", "place"), (5, 3, 2))[0]
    return definition(rng, kind.name, rng.choice(kind.texts), key, rng.choice(CITY_TEXTS))


def other(rng: random.Random) -> Tool:
    """A definition of a tool that no question is for."""
    return definition(rng, *rng.choice(OTHER_TOOLS), rng.choice(("", "The value")))


def offered(rng: random.Random, *kinds: Kind) -> list[Tool]:
    """These tools, or either or both, sometimes beside another one."""
    kinds = kinds or rng.choices(((WEATHER,), (TIME,), (WEATHER, TIME)), (3, 2, 4))[0]
    tools = [known(rng, kind) for kind in kinds] + ([other(rng)] if rng.random() < 0.2 else [])
    rng.shuffle(tools)
    return tools


def keys_of(tools: list[Tool] | None) -> dict[str, str]:
    """By the name of each offered tool of the two: its parameter for the city."""
    functions = [entry["function"] for entry in tools or []]
    return {f["name"]: next(iter(f["parameters"]["properties"])) for f in functions if f["name"] in KINDS}


def ask_one(rng: random.Random, held: bool, kind: Kind, unseen: bool = False) -> tuple[str, list[Call]]:
    city = values.place(rng, held, unseen)
    return rng.choice(kind.of_one[held]).format(city=city), [(kind, city)]


def ask_two_cities(
    rng: random.Random, held: bool, kind: Kind, unseen: bool = False
) -> tuple[str, list[Call]]:
    first, second = values.place(rng, held, unseen), values.place(rng, held, unseen)
    while first == second:
        second = values.place(rng, held, unseen)
    question = rng.choice(kind.of_two[held]).format(a=first, b=second)
    return question, [(kind, first), (kind, second)]


def ask_both_tools(rng: random.Random, held: bool, unseen: bool = False) -> tuple[str, list[Call]]:
    city, kinds = values.place(rng, held, unseen), rng.sample((WEATHER, TIME), 2)
    form = rng.choice(tool_phrases.HELD_BOTH if held else tool_phrases.BOTH)
    question = form.format(x=kinds[0].noun, y=kinds[1].noun, city=city)
    return question[0].upper() + question[1:], [(kind, city) for kind in kinds]


def ask_several(
    rng: random.Random, held: bool, keys: dict[str, str], unseen: bool = False
) -> tuple[str, list[Call]]:
    """A question for two calls of the offered tools."""
    if len(keys) == 2 and rng.random() < 0.4:
        return ask_both_tools(rng, held, unseen)
    return ask_two_cities(rng, held, KINDS[rng.choice(sorted(keys))], unseen)


def ask(rng: random.Random, held: bool, keys: dict[str, str]) -> tuple[str, list[Call]]:
    """Any question for the tools; those that are not offered are asked for, too, though less often."""
    if keys and rng.random() < 0.35:
        return ask_several(rng, held, keys)
    names = sorted(keys) if keys and rng.random() < 0.85 else sorted(KINDS)
    return ask_one(rng, held, KINDS[rng.choice(names)])


def exchange(
    rng: random.Random, held: bool, keys: dict[str, str], asked: tuple[str, list[Call]]
) -> list[Message]:
    """A question: the calls, their results and an answer, or a refusal where the tool is not offered."""
    question, calls = asked
    lower = all(city in values.KNOWN_CITIES for _, city in calls)
    question = roughen(question if question[-1] in ".?" else question + "?", rng, held, lower=lower)
    missing = next((kind for kind, _ in calls if kind.name not in keys), None)
    if missing:
        thought = f"No {missing.noun} tool is offered to me."
        return [say("user", question), say("assistant", missing.refusal, thought)]
    wanted = " and ".join(f"the {kind.noun} in {city}" for kind, city in calls)
    turn = say("assistant", "", f"I need {wanted}.") | {
        "tool_calls": [call_of(keys, *call) for call in calls]
    }
    results = [kind.result(rng, held, city) for kind, city in calls]
    answer = " ".join(said for _, said in results)
    thought = "The tool has answered." if len(calls) == 1 else "The tools have answered."
    returned = [say("tool", text) for text, _ in results]
    return [say("user", question), turn, *returned, say("assistant", answer, thought)]


def call_of(keys: dict[str, str], kind: Kind, city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": kind.name, "arguments": {keys[kind.name]: city}}}
