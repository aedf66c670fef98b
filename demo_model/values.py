# SPDX-License-Identifier: Apache-2.0
"""Names and other values that fill the phrasings; the `HELD_*` ones never occur in training.

Made-up names come from syllables, from letters and from parts of real words, so that copying is learnt piece by piece.
"""

from __future__ import annotations

import random

from demo_model import facts


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = words("""
Anna Tom Ben Maria Peter Laura David Sophie Paul Emma Lukas Julia Max Lena Felix Clara Jonas Nina
Simon Eva Martin Sara Daniel Lisa Oscar Alice Hugo Chloe Leo Zoe Adam Olga Ivan Elena Marco Giulia
Carlos Rosa Pedro Ines Miguel Carmen Jack Emily Harry Grace James Ella Henry Ruby George Amy Oliver
Lucy Arthur Kate Yuki Kenji Mei Chen Amir Leila Omar Fatima Hassan Noor Priya Raj Anil Deepa Kofi
Ama Sven Astrid Lars Ingrid Nils Freya Erik Maja Piotr Agnes Jan Hana Milan Vera Victor Irene Robert
Helen Frank Diana Walter Susan Karl Monica Bruno Tina Dora Philip Nora Stefan
""")
HELD_NAMES = words("""
Matteo Beatrix Rodrigo Linnea Thomas Yvonne Gabriel Samira Tobias Camille Dmitri Marlene Tristan
Viola Edgar Kirsten Rafael Nadia Conrad Isabel
""")
CITIES = (
    *words("""
Munich Hamburg Cologne Lyon Nice Barcelona Seville Milan Naples Turin Venice Geneva Zurich Basel
Bergen Gothenburg Krakow Prague Bern Amsterdam Rotterdam London Manchester Liverpool Edinburgh
Glasgow Cardiff Boston Chicago Seattle Denver Dallas Miami Toronto Montreal Vancouver Sydney
Melbourne Perth Mumbai Delhi Shanghai Osaka Kyoto Seoul Singapore Dubai Istanbul Casablanca Lagos
Durban Rio Salvador Medellin Houston Phoenix Austin Leeds Ghent Antwerp Graz Salzburg
"""),
    "New York", "Los Angeles", "San Francisco", "Hong Kong", "Cape Town", "Las Vegas", "Tel Aviv",
    "San Diego", "Kuala Lumpur", "Saint Petersburg", "Rio de Janeiro", "San Jose",
)  # fmt: skip
HELD_CITIES = (
    *words("""
Porto Bordeaux Valencia Dresden Leipzig Florence Bologna Utrecht Malmo Turku Gdansk Brno Bristol
Oxford Portland Atlanta Calgary Brisbane Jakarta Busan Karachi Marrakesh Cordoba Stuttgart
"""),
    "Santa Fe", "New Orleans", "San Antonio",
)  # fmt: skip
ITEMS = words("""
apples pears books pens chairs tables lamps cups plates shirts shoes bananas lemons tomatoes eggs
bottles tickets pencils bags boxes oranges candles keys phones bikes hats gloves cakes cookies
flowers towels knives forks spoons umbrellas clocks mirrors bricks stamps batteries carrots onions
melons
""")
EVENTS = (
    "wedding", "party", "meeting", "concert", "dentist appointment", "job interview", "birthday party",
    "lecture", "football match", "dinner", "conference", "workshop", "picnic", "piano lesson",
    "doctor appointment", "trip", "graduation", "seminar", "dance class", "barbecue",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip

_STARTS = words(
    "B C D F G H J K L M N P R S T V W Z Br Ch Cl Dr Fr Gr Kr Pl Qu Sh St Th Tr A E I O U Y X Sch Bl Mc"
)
_VOWELS = words("a e i o u a e i o ai ea ie ou oo ee ia io au")
_MIDDLES = words(
    "b d f g k l m n p r s t v z ll nn rr ss tt nd nt rk st rt ld rs mb ch sh th gh ck nk lv x w ffr rdt"
)
_ENDS = (
    "", "", "n", "r", "s", "l", "t", "m", "d", "ra", "na", "lle", "ton", "berg", "ville", "ford", "burg",
    "stad", "ne", "ta", "do", "ia", "co", "rdo", "x", "ck", "mar", "lin", "ger", "land", "poli", "gart",
)  # fmt: skip
_FIRSTS = ("New", "San", "Port", "Saint", "Los", "Santa", "Old", "El", "La")


_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_ACCENTED = "éèáàóíúüöäñçøåłšã"
_REAL = tuple(word for word in (*NAMES, *CITIES, *facts.CAPITALS, *facts.CAPITALS.values()) if word.isalpha())
KNOWN_CITIES = tuple(dict.fromkeys((*facts.CAPITALS.values(), *CITIES)))
MADE_UP_SHARE = 0.5
"""How many of the names and cities in training are made up: they can only be copied, the others may be recalled."""


def made_up(rng: random.Random) -> str:
    """A proper name that almost surely is not a real one."""
    word = rng.choices((_of_syllables, _of_letters, _spliced, _misspelt), (30, 25, 30, 15))[0](rng)
    name = word[0].upper() + word[1:].lower()
    return made_up(rng) if name in HELD_NAMES + HELD_CITIES else name


def _of_syllables(rng: random.Random) -> str:
    """Pronounceable."""
    middle = "".join(
        rng.choice(_VOWELS) + rng.choice(_MIDDLES) for _ in range(rng.choice((0, 1, 1, 1, 2, 2)))
    )
    return rng.choice(_STARTS) + middle + rng.choice(_VOWELS) + rng.choice(_ENDS)


def _of_letters(rng: random.Random) -> str:
    """Letters as often as in English, vowels and consonants taking turns more often than not."""
    word = rng.choice(_LETTERS)
    for _ in range(rng.randrange(2, 9)):
        turns = [letter for letter in _LETTERS if (letter in "aeiou") != (word[-1] in "aeiou")]
        letters = turns if rng.random() < 0.75 else _LETTERS
        word += letters[int(len(letters) * rng.random() ** 1.3)]
    return word


def _spliced(rng: random.Random) -> str:
    """The head of one real word and the tail of another: pieces that real names are made of."""
    head, tail = rng.choice(_REAL), rng.choice(_REAL)
    return head[: rng.randrange(1, len(head))] + tail[rng.randrange(1, len(tail)) :]


def _misspelt(rng: random.Random) -> str:
    """A real word with a letter or two replaced, added or left out."""
    word = rng.choice(_REAL)
    for _ in range(rng.choice((1, 1, 2))):
        at, letters = rng.randrange(len(word)), _ACCENTED if rng.random() < 0.2 else _LETTERS
        word = (
            word[:at]
            + rng.choice((rng.choice(letters), rng.choice(letters), ""))
            + word[at + rng.randrange(2) :]
        )
        word = word or rng.choice(_REAL)
    return word


def made_up_place(rng: random.Random) -> str:
    """A made-up town, sometimes of two words."""
    name = (rng.choice(_FIRSTS) + " " if rng.random() < 0.12 else "") + made_up(rng)
    return made_up_place(rng) if name in HELD_CITIES else name


def person(rng: random.Random, held: bool, unseen: bool) -> str:
    """A name: for the evaluation a known one or one never seen, in training mostly a made-up one."""
    if unseen:
        return rng.choice(HELD_NAMES)
    if held or rng.random() > MADE_UP_SHARE:
        return rng.choice(NAMES)
    return f"{made_up(rng)} {made_up(rng)}" if rng.random() < 0.1 else made_up(rng)


def place(rng: random.Random, held: bool, unseen: bool) -> str:
    """A city, likewise."""
    if unseen:
        return rng.choice(HELD_CITIES)
    return rng.choice(KNOWN_CITIES) if held or rng.random() > MADE_UP_SHARE else made_up_place(rng)
