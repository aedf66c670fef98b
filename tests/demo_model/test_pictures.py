# SPDX-License-Identifier: Apache-2.0
"""Pictures and questions: every answer follows from the picture, and what is held out is held out."""

from __future__ import annotations

import itertools
import random

import pytest

from demo_model.pictures import (
    COLORS,
    HELD_PHRASINGS,
    HELD_WORDS,
    NUMBERS,
    PHRASINGS,
    PLACES,
    SHAPES,
    SIDE,
    WORDS,
    Item,
    Picture,
    draw,
    examples,
    picture,
    plural,
    question,
)

SEEDS = range(150)


def test_items_are_apart_and_inside() -> None:
    for seed in SEEDS:
        items = picture(random.Random(seed)).items
        assert all(0 < one.x < SIDE and 0 < one.y < SIDE for one in items)
        shapes = [one for one in items if one.kind in SHAPES]
        for one, other in itertools.combinations(shapes, 2):
            assert (one.x - other.x) ** 2 + (one.y - other.y) ** 2 > (one.radius + other.radius) ** 2


def test_an_item_has_its_color_at_its_center() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        shown = picture(rng)
        image = draw(shown, rng, 128)
        for one in shown.items:
            if one.kind in SHAPES:
                pixel = image.getpixel((one.x * 2, one.y * 2))
                assert isinstance(pixel, tuple)
                assert nearest(pixel) == one.color


def nearest(pixel: tuple[int, ...]) -> str:
    def distance(color: str) -> int:
        return sum((a - b) ** 2 for a, b in zip(pixel, COLORS[color], strict=True))

    return min(COLORS, key=distance)


@pytest.mark.parametrize("held", [False, True])
def test_answers_follow_from_the_picture(held: bool) -> None:
    seen = set()
    for seed in SEEDS:
        rng = random.Random(seed)
        shown = picture(rng, held)
        for one in [question(rng, shown, held) for _ in range(8)]:
            seen.add(one.kind)
            check(shown, one.kind, one.text.lower(), one.answer)
    assert seen == set(PHRASINGS)


def check(shown: Picture, kind: str, text: str, answer: str) -> None:
    """Assert an answer by another way than it was made."""
    answer = answer.removesuffix(".")
    if kind == "count":
        number, *words = answer.lower().split()
        assert NUMBERS.index(number) == sum(matches(one, words) for one in shown.items if not shown.text)
    elif kind == "background":
        assert answer.lower() == shown.background
    elif kind in ("number", "word"):
        assert answer in (shown.text, f"There is no {kind}")
    elif kind in ("exists", "relation"):
        assert answer in ("Yes", "No")
    elif kind == "place":
        assert answer.lower() in itertools.chain(*PLACES)
    elif kind == "color":
        assert answer.lower() in {one.color for one in shown.items}
    elif kind == "shape":
        assert answer.lower().removeprefix("a ") in {one.kind for one in shown.items}
    else:
        assert all(one.color in answer.lower() for one in shown.items)


def matches(item: Item, words: list[str]) -> bool:
    names = {item.color, item.kind, plural(item.kind), "shape", "shapes"}
    return set(words) <= names


def test_held_out_words_and_phrasings_are_not_learned() -> None:
    assert not set(WORDS) & set(HELD_WORDS)
    assert not set(itertools.chain(*PHRASINGS.values())) & set(itertools.chain(*HELD_PHRASINGS.values()))
    rng = random.Random(5)
    assert not {picture(rng).text for _ in range(2000)} & set(HELD_WORDS)


def test_examples_are_the_same_for_a_seed() -> None:
    first, second = (list(examples(3, 5)) for _ in range(2))
    assert [(image.tobytes(), asked) for image, asked in first] == [
        (image.tobytes(), asked) for image, asked in second
    ]
