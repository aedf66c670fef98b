# SPDX-License-Identifier: Apache-2.0
"""Pictures drawn by Pillow, and questions about them: shapes, their colors, counts and places, numbers, words.

Everything is a function of a random generator. A picture is a square of any side; its items keep their place and size
in sixty-fourths of it. With `held=True` words and phrasings are those that training never has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from demo_model.phrases import expand_all
from demo_model.values import words

SIDE = 64
COLORS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (245, 220, 50),
    "orange": (245, 140, 30), "purple": (140, 50, 170), "black": (15, 15, 15), "white": (250, 250, 250),
    "gray": (150, 150, 150),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
KINDS = (*SHAPES, *DIGITS, *LETTERS)
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
WORDS = words("""
CAT DOG SUN CAR BUS HAT CUP BOX KEY MAP PEN BED TREE FISH BIRD MOON STAR BOOK DOOR SHIP RAIN SNOW FIRE
LEAF ROSE MILK CAKE HOME ROAD HAND YES NO GO STOP OPEN EXIT HELP LOVE GOOD FOX JAM ZOO VAN WEB QUIZ
""")
HELD_WORDS = words("""
COW PIG BEE ANT OWL EGG ICE TEA PIE SKY SEA TOY BAG LAMP FROG DUCK BEAR LION WOLF GOAT CORN RICE SALT SAND
GOLD KING RING WIND HILL LAKE PARK SHOP PUSH PULL FREE SALE WAIT TAXI JAZZ FOOD
""")
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)


@dataclass(frozen=True)
class Item:
    """Shape, digit or letter: its kind, its color, its center and its radius in sixty-fourths."""

    kind: str
    color: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Picture:
    """Items on a background; `text` is a number or a word whose signs are the items, or empty."""

    items: tuple[Item, ...]
    background: str
    text: str = ""

    @property
    def is_number(self) -> bool:
        return self.text.isdigit()


@dataclass(frozen=True)
class Question:
    """Question about a picture, its answer, and the kind under which it is judged."""

    kind: str
    text: str
    answer: str


# Drawing


def draw(picture: Picture, rng: random.Random, side: int = 2 * SIDE) -> Image.Image:
    """Return the picture, side x side, in shades near its colors."""
    image = Image.new("RGB", (side, side), _shade(picture.background, rng))
    canvas, scale, shades = ImageDraw.Draw(image), side / SIDE, {}
    for item in picture.items:
        fill = shades.setdefault(item.color, _shade(item.color, rng))
        x, y, radius = item.x * scale, item.y * scale, item.radius * scale
        if item.kind in SHAPES:
            _draw_shape(canvas, item.kind, (x, y), radius, fill, rng.uniform(-0.15, 0.15))
        else:
            canvas.text((x, y), item.kind, fill, _font(round(2 * radius)), anchor="mm")
    return image


def _shade(color: str, rng: random.Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + rng.randint(-14, 14))) for value in COLORS[color])


def _draw_shape(
    canvas: ImageDraw.ImageDraw,
    kind: str,
    center: tuple[float, float],
    radius: float,
    fill: tuple[int, ...],
    turn: float,
) -> None:
    x, y = center
    if kind == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
    else:
        canvas.polygon([(x + radius * a, y + radius * b) for a, b in _corners(kind, turn)], fill)


def _corners(kind: str, turn: float) -> list[tuple[float, float]]:
    """Return the corners of a shape in a circle of radius 1, turned by an angle in radians."""
    if kind == "cross":
        wide, thin = 0.95, 0.32
        points = [(thin, wide), (thin, thin), (wide, thin), (wide, -thin), (thin, -thin), (thin, -wide)]
        points += [(-a, -b) for a, b in points]
        return [_turned(a, b, turn) for a, b in points]
    count, first = {"square": (4, math.pi / 4), "diamond": (4, 0.0), "triangle": (3, -math.pi / 2)}.get(
        kind, (10, -math.pi / 2)
    )
    radii = [0.45 if kind == "star" and i % 2 else 1.0 for i in range(count)]
    angles = [first + 2 * math.pi * i / count for i in range(count)]
    corners = [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]
    return [_turned(0.7 * a if kind == "diamond" else a, b, turn) for a, b in corners]


def _turned(a: float, b: float, turn: float) -> tuple[float, float]:
    return a * math.cos(turn) - b * math.sin(turn), a * math.sin(turn) + b * math.cos(turn)


# Inventing


def picture(rng: random.Random, held: bool = False) -> Picture:
    """Return a random picture: of every five, three have shapes, one a number and one a word."""
    maker = rng.choices((_alike, _mixed, _number, _word), (28, 32, 16, 24))[0]
    return maker(rng, held)


def _alike(rng: random.Random, held: bool) -> Picture:
    kind, (color, background) = rng.choice(SHAPES), _colors(rng, 2)
    return Picture(tuple(_placed(rng, [(kind, color)] * rng.randint(1, 6))), background)


def _mixed(rng: random.Random, held: bool) -> Picture:
    *colors, background = _colors(rng, rng.randint(2, 4))
    looks = [(rng.choice(SHAPES), rng.choice(colors)) for _ in range(rng.randint(2, 4))]
    return Picture(tuple(_placed(rng, looks)), background)


def _number(rng: random.Random, held: bool) -> Picture:
    return _written(rng, str(rng.randrange(10 ** rng.randint(1, 3))))


def _word(rng: random.Random, held: bool) -> Picture:
    if held or rng.random() < 0.3:
        return _written(rng, rng.choice(HELD_WORDS if held else WORDS))
    while True:
        text = "".join(rng.choices(LETTERS, k=rng.randint(2, 4)))
        if text not in HELD_WORDS:
            return _written(rng, text)


def _colors(rng: random.Random, count: int) -> list[str]:
    """Return so many different colors; the last is that of the background, most often white."""
    colors = rng.sample(list(COLORS), count)
    if rng.random() < 0.5 and "white" not in colors:
        colors[-1] = "white"
    return colors


def _placed(rng: random.Random, looks: list[tuple[str, str]]) -> list[Item]:
    """Return items that do not touch one another or the edge."""
    largest = (20, 14, 12, 10, 9, 8)[len(looks) - 1]
    items: list[Item] = []
    while len(items) < len(looks):
        radius = rng.uniform(6 if len(looks) < 4 else 5, largest)
        x, y = (rng.uniform(radius + 1, SIDE - radius - 1) for _ in range(2))
        if all(math.hypot(x - one.x, y - one.y) > radius + one.radius + 2 for one in items):
            items.append(Item(*looks[len(items)], x, y, radius))
        elif rng.random() < 0.02:
            items.clear()
    return items


def _written(rng: random.Random, text: str) -> Picture:
    """Return a picture of a text in one line."""
    color, background = _colors(rng, 2)
    widest = (SIDE - 4) / (2 * sum(_width(sign) for sign in text))
    radius = rng.uniform(min(10.0, widest), min(16.0, widest))
    length = sum(2 * radius * _width(sign) for sign in text)
    left, y = rng.uniform(2, SIDE - 2 - length), rng.uniform(radius, SIDE - radius)
    items = []
    for sign in text:
        wide = 2 * radius * _width(sign)
        items.append(Item(sign, color, left + wide / 2, y, radius))
        left += wide
    return Picture(tuple(items), background, text)


def _width(sign: str) -> float:
    """Return the advance of a sign in units of its font's size, no less than what keeps centers apart."""
    return max(0.58, _font(100).getlength(sign) / 100 + 0.04)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    """Return the font that Pillow carries; size in pixels."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow has no FreeType; install one that has (its wheels do)")
    return font


# Asking

_Q = {
    "description": ("What is in [the|this] picture", "Describe [the|this] picture", "What do you see",
                    "What is [this|shown here|in the image]", "Describe the image", "What can you see",
                    "What does [the|this] picture show"),
    "count": ("How many {} are there", "How many {} are in the picture", "How many {} do you see",
              "Count the {}", "How many {} can you see"),
    "color": ("[What|Which] colo[|u]r is {}", "What is the colo[|u]r of {}"),
    "shape": ("[What|Which] shape is {}", "What is the shape that is {}"),
    "exists": ("Is there {}", "Do you see {}", "Is there {} in the picture", "Can you see {}"),
    "place": ("Where is {}", "In which part of the picture is {}", "Where do you see {}"),
    "relation": ("Is {} {}",),
    "background": ("[What|Which] colo[|u]r is the background", "What is the colo[|u]r of the background"),
    "number": ("[What|Which] number is [this|it|shown|in the picture]", "Read the number", "What is the number"),
    "word": ("What does it say", "What is written [here|in the picture|there]", "Read the [text|word]",
             "[What|Which] word is [this|it|shown]", "What does the [text|word|sign] say"),
}  # fmt: skip
_HELD = {
    "description": ("Tell me what is in the picture", "What does the image show"),
    "count": ("Tell me how many {} there are", "What is the number of {}"),
    "color": ("Tell me the colo[|u]r of {}",),
    "shape": ("What kind of shape is {}",),
    "exists": ("Does the picture have {}", "Is {} in the picture"),
    "place": ("Where can you see {}", "Tell me where {} is"),
    "relation": ("Tell me, is {} {}",),
    "background": ("Tell me the colo[|u]r of the background", "Which colo[|u]r does the background have"),
    "number": ("Tell me the number", "Which number do you see"),
    "word": ("Which word do you see", "Tell me what it says"),
}
PHRASINGS = {kind: tuple(expand_all(patterns)) for kind, patterns in _Q.items()}
HELD_PHRASINGS = {kind: tuple(expand_all(patterns)) for kind, patterns in _HELD.items()}
Asked = tuple[str, tuple[str, ...], str]  # Kind, what fills the phrasing, and the answer.


def question(rng: random.Random, shown: Picture, held: bool = False) -> Question:
    """Return a random question about a picture."""
    while True:
        asked = rng.choice(_ASKERS[bool(shown.text) + (shown.is_number)])(rng, shown)
        if asked is not None:
            break
    kind, filling, answer = asked
    text = rng.choice((HELD_PHRASINGS if held else PHRASINGS)[kind]).format(*filling)
    if not held and rng.random() < 0.15:
        text = text.lower()
    mark = "?" if held or rng.random() < 0.85 else ""
    tells = text.split()[0].lower() in ("describe", "count", "read", "tell")
    return Question(kind, text + ("." if tells and mark else mark), _sentence(answer))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _named(color: str, kind: str, count: int) -> str:
    """Return "a red circle" or "three red circles"."""
    name = f"{color} {kind}".strip()
    if count == 1:
        return f"{'an' if name[0] in 'aeo' else 'a'} {name}"
    return f"{NUMBERS[count]} {plural(name)}"


def plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def _describe(rng: random.Random, shown: Picture) -> Asked:
    """Text, or groups of like items from left to right."""
    if shown.text:
        noun = "number" if shown.is_number else "word"
        return "description", (), f"the {noun} {shown.text} in {shown.items[0].color}"
    looks = [(one.color, one.kind) for one in sorted(shown.items, key=lambda one: one.x)]
    parts = [_named(*look, looks.count(look)) for look in dict.fromkeys(looks)]
    return "description", (), " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def _count(rng: random.Random, shown: Picture) -> Asked:
    present = rng.random() < 0.8 and not shown.text
    one = rng.choice(shown.items) if present else None
    kind = one.kind if one else rng.choice(SHAPES)
    color = one.color if one else rng.choice(list(COLORS))
    color, kind = rng.choice(((color, kind), ("", kind), (color, "shape"), ("", "shape")))
    count = sum(_fits(item, color, kind) for item in shown.items) if not shown.text else 0
    name = f"{color} {kind}".strip()
    return "count", (plural(name),), f"{NUMBERS[count]} {name if count == 1 else plural(name)}"


def _fits(item: Item, color: str, kind: str) -> bool:
    return color in ("", item.color) and kind in ("shape", item.kind)


def _unique(rng: random.Random, shown: Picture, by: Callable[[Item], str]) -> Item | None:
    """Return an item that no other is like."""
    values = [by(item) for item in shown.items]
    alone = [item for item in shown.items if values.count(by(item)) == 1]
    return rng.choice(alone) if alone else None


def _color(rng: random.Random, shown: Picture) -> Asked | None:
    if shown.text:
        noun = "number" if shown.is_number else rng.choice(("word", "text"))
        return "color", (f"the {noun}",), shown.items[0].color
    one = _unique(rng, shown, lambda item: item.kind)
    if one is None:
        return None
    names = (f"the {one.kind}", "it") if len(shown.items) == 1 else (f"the {one.kind}",)
    return "color", (rng.choice(names),), one.color


def _shape(rng: random.Random, shown: Picture) -> Asked | None:
    one = _unique(rng, shown, lambda item: item.color)
    if one is None:
        return None
    names = ("it", one.color) if len(shown.items) == 1 else (one.color,)
    return "shape", (rng.choice(names),), f"a {one.kind}"


def _exists(rng: random.Random, shown: Picture) -> Asked:
    one = rng.choice(shown.items)
    color, kind = one.color, one.kind
    if rng.random() < 0.5 or shown.text:
        color, kind = rng.choice(((color, rng.choice(SHAPES)), (rng.choice(list(COLORS)), kind)))
        kind = kind if kind in SHAPES else rng.choice(SHAPES)
    if rng.random() < 0.3:
        color = ""
    there = not shown.text and any(_fits(item, color, kind) for item in shown.items)
    return "exists", (_named(color, kind, 1),), "yes" if there else "no"


def _pointed(rng: random.Random, shown: Picture) -> tuple[Item, str] | None:
    """Return an item and the words that mean it alone."""
    for by in rng.sample((lambda one: f"the {one.kind}", lambda one: f"the {one.color} {one.kind}"), 2):
        one = _unique(rng, shown, by)
        if one is not None:
            return one, by(one)
    return None


def _place(rng: random.Random, shown: Picture) -> Asked | None:
    pointed = _pointed(rng, shown)
    if pointed is None:
        return None
    one, name = pointed
    thirds = one.y / SIDE * 3, one.x / SIDE * 3
    if any(abs(value - edge) < 0.12 for value in thirds for edge in (1, 2)):
        return None
    return "place", (name,), PLACES[int(thirds[0])][int(thirds[1])]


def _relation(rng: random.Random, shown: Picture) -> Asked | None:
    one, other = (_pointed(rng, shown) for _ in range(2))
    if one is None or other is None or one[0] is other[0]:
        return None
    side, difference = rng.choice(
        (("left of", other[0].x - one[0].x), ("right of", one[0].x - other[0].x),
         ("above", other[0].y - one[0].y), ("below", one[0].y - other[0].y))
    )  # fmt: skip
    if abs(difference) < 5:
        return None
    return "relation", (one[1], f"{side} {other[1]}"), "yes" if difference > 0 else "no"


def _background(rng: random.Random, shown: Picture) -> Asked:
    return "background", (), shown.background


def _read(rng: random.Random, shown: Picture) -> Asked:
    return ("number" if shown.is_number else "word"), (), shown.text


def _unread(rng: random.Random, shown: Picture) -> Asked:
    noun = rng.choice(("number", "word"))
    return noun, (), f"there is no {noun}"


_ASKERS: tuple[tuple[Callable[[random.Random, Picture], Asked | None], ...], ...] = (
    (_describe, _describe, _count, _count, _count, _color, _shape, _exists, _exists, _place, _place, _relation,
     _background, _unread),
    (_read, _read, _read, _read, _describe, _describe, _color, _background, _count, _exists),
    (_read, _read, _read, _read, _describe, _describe, _color, _background, _count, _exists),
)  # fmt: skip


Example = tuple[Image.Image, Question]


def examples(seed: int, count: int, held_phrasings: bool = False, side: int = 2 * SIDE) -> Iterator[Example]:
    """Yield held-out pictures, each with one question; words are those that training never has."""
    rng = random.Random(seed)
    for _ in range(count):
        shown = picture(rng, held=True)
        yield draw(shown, rng, side), question(rng, shown, held_phrasings)
