# SPDX-License-Identifier: Apache-2.0
"""The small world quire-demo knows; every relation maps a subject to exactly one true object.

A relation lists question phrasings for training and others for the held-out evaluation; the two never
overlap.
Phrasings are noun phrases ("the capital of {x}"), which are put into a question frame, and whole questions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One kind of fact: its table, its phrasings and how the answer reads."""

    name: str
    table: dict[str, str]
    answer: str
    noun: tuple[str, ...]
    asked: tuple[str, ...]
    held_noun: tuple[str, ...]
    held_asked: tuple[str, ...]


def pairs(text: str) -> dict[str, str]:
    """Read `subject=object` entries separated by commas or line ends."""
    entries = (entry.strip() for entry in text.replace("\n", ",").split(","))
    halves = (entry.partition("=") for entry in entries if entry)
    return {subject.strip(): value.strip() for subject, _, value in halves}


CAPITALS = pairs("""
France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Greece=Athens, Austria=Vienna
Belgium=Brussels, Denmark=Copenhagen, Sweden=Stockholm, Norway=Oslo, Finland=Helsinki, Iceland=Reykjavik
Ireland=Dublin, Poland=Warsaw, Hungary=Budapest, Romania=Bucharest, Bulgaria=Sofia, Croatia=Zagreb
Serbia=Belgrade, Slovenia=Ljubljana, Slovakia=Bratislava, Ukraine=Kyiv, Russia=Moscow, Estonia=Tallinn
Latvia=Riga, Lithuania=Vilnius, Albania=Tirana, Malta=Valletta, Cyprus=Nicosia, Turkey=Ankara, Georgia=Tbilisi
Armenia=Yerevan, Azerbaijan=Baku, Iran=Tehran, Iraq=Baghdad, Syria=Damascus, Lebanon=Beirut, Jordan=Amman
Qatar=Doha, Oman=Muscat, China=Beijing, Japan=Tokyo, India=New Delhi, Pakistan=Islamabad, Nepal=Kathmandu
Bangladesh=Dhaka, Thailand=Bangkok, Vietnam=Hanoi, Cambodia=Phnom Penh, Laos=Vientiane, Mongolia=Ulaanbaatar
Taiwan=Taipei, Philippines=Manila, Egypt=Cairo, Morocco=Rabat, Algeria=Algiers, Tunisia=Tunis, Libya=Tripoli
Sudan=Khartoum, Ethiopia=Addis Ababa, Somalia=Mogadishu, Kenya=Nairobi, Uganda=Kampala, Rwanda=Kigali
Nigeria=Abuja, Ghana=Accra, Senegal=Dakar, Mali=Bamako, Angola=Luanda, Zambia=Lusaka, Zimbabwe=Harare
Mozambique=Maputo, Namibia=Windhoek, Botswana=Gaborone, Madagascar=Antananarivo, Canada=Ottawa
Mexico=Mexico City, Cuba=Havana, Jamaica=Kingston, Haiti=Port-au-Prince, Guatemala=Guatemala City
Honduras=Tegucigalpa, Nicaragua=Managua, Panama=Panama City, Colombia=Bogota, Venezuela=Caracas, Ecuador=Quito
Peru=Lima, Brazil=Brasilia, Chile=Santiago, Argentina=Buenos Aires, Uruguay=Montevideo, Paraguay=Asuncion
Australia=Canberra, New Zealand=Wellington, Fiji=Suva, Afghanistan=Kabul, Kazakhstan=Astana
Uzbekistan=Tashkent
Saudi Arabia=Riyadh, Luxembourg=Luxembourg City, Belarus=Minsk, Moldova=Chisinau
""")

CONTINENTS = pairs("""
France=Europe, Germany=Europe, Italy=Europe, Spain=Europe, Norway=Europe, Poland=Europe, Greece=Europe
China=Asia, Japan=Asia, India=Asia, Vietnam=Asia, Thailand=Asia, Nepal=Asia, Iran=Asia
Egypt=Africa, Kenya=Africa, Nigeria=Africa, Morocco=Africa, Ghana=Africa, Ethiopia=Africa, Angola=Africa
Canada=North America, Mexico=North America, Cuba=North America
Brazil=South America, Peru=South America, Chile=South America, Argentina=South America
""")

LANGUAGES = pairs("""
France=French, Germany=German, Italy=Italian, Spain=Spanish, Portugal=Portuguese, Greece=Greek, Poland=Polish
Sweden=Swedish, Denmark=Danish, Hungary=Hungarian, Japan=Japanese, Brazil=Portuguese, Mexico=Spanish
Russia=Russian, Turkey=Turkish, Egypt=Arabic, Austria=German, Vietnam=Vietnamese, Thailand=Thai, Iran=Persian
""")

CURRENCIES = pairs("""
Japan=yen, Germany=euro, France=euro, Spain=euro, India=rupee, China=yuan, Russia=ruble, Mexico=peso
Poland=zloty, Sweden=krona, Norway=krone, Turkey=lira, Thailand=baht, Israel=shekel, Vietnam=dong
""")

SYMBOLS = pairs("""
hydrogen=H, helium=He, lithium=Li, carbon=C, nitrogen=N, oxygen=O, neon=Ne, sodium=Na, magnesium=Mg
aluminium=Al, silicon=Si, sulfur=S, chlorine=Cl, argon=Ar, potassium=K, calcium=Ca, iron=Fe, nickel=Ni
copper=Cu, zinc=Zn, silver=Ag, tin=Sn, gold=Au, mercury=Hg, lead=Pb, uranium=U
""")

OPPOSITES = pairs("""
hot=cold, cold=hot, big=small, small=big, up=down, down=up, fast=slow, slow=fast, old=young, tall=short
happy=sad, sad=happy, light=dark, dark=light, open=closed, full=empty, empty=full, rich=poor, hard=soft
wet=dry, dry=wet, good=bad, high=low, strong=weak, loud=quiet, near=far, early=late, clean=dirty, true=false
left=right, day=night, love=hate
""")

COLOURS = pairs("""
grass=green, snow=white, blood=red, coal=black, banana=yellow, lemon=yellow, milk=white, chocolate=brown
tomato=red, sky=blue, cucumber=green, flamingo=pink
""")

SOUNDS = pairs("""
dog=woof, cat=meow, cow=moo, sheep=baa, duck=quack, horse=neigh, pig=oink, lion=roar, bee=buzz, snake=hiss
owl=hoot, frog=croak
""")

YOUNG = pairs("""
dog=puppy, cat=kitten, cow=calf, sheep=lamb, duck=duckling, horse=foal, pig=piglet, lion=cub, goat=kid
hen=chick, frog=tadpole, swan=cygnet, deer=fawn, kangaroo=joey
""")

LEGS = pairs(
    "dog=4, cat=4, spider=8, ant=6, bird=2, human=2, horse=4, bee=6, snake=0, crab=10, fish=0, cow=4"
)

DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTH_NAMES = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
               "October",
               "November", "December")  # fmt: skip
PLANET_NAMES = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")

CALENDAR = DAY_NAMES, MONTH_NAMES
AFTER = {name: names[(i + 1) % len(names)] for names in CALENDAR for i, name in enumerate(names)}
BEFORE = {name: names[i - 1] for names in CALENDAR for i, name in enumerate(names)}
PLANETS = dict(zip(ORDINALS, PLANET_NAMES, strict=True))
CAPITAL_OF = {city: country for country, city in list(CAPITALS.items())[:48]}

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "capital", CAPITALS, "The capital of {x} is {y}.",
        ("the capital of {x}", "the capital city of {x}", "{x}'s capital", "{x}'s capital city"),
        ("Which city is the capital of {x}?", "What city is the capital of {x}?", "{x} capital?",
         "Capital of {x}?",
         "The capital of {x} is?", "What do you call the capital of {x}?", "Which is the capital of {x}?",
         "Which city is {x}'s capital?", "What is {x}'s capital called?"),
        ("the name of the capital of {x}",),
        ("Which city serves as the capital of {x}?", "{x} has which capital?", "What city is {x}'s capital?"),
    ),
    Relation(
        "capital of", CAPITAL_OF, "{x} is the capital of {y}.",
        ("the country whose capital is {x}", "the country that has {x} as its capital"),
        ("{x} is the capital of which country?", "Which country has {x} as its capital?",
         "{x} is the capital of?",
         "What country is {x} the capital of?", "Whose capital is {x}?",
         "{x} is the capital of what country?",
         "Which country has the capital {x}?"),
        ("the country with the capital {x}",),
        ("Which country is {x} the capital of?", "{x} is which country's capital?"),
    ),
    Relation(
        "continent", CONTINENTS, "{x} is in {y}.",
        ("the continent of {x}", "the continent where {x} is", "the continent {x} is in"),
        ("Which continent is {x} in?", "On which continent is {x}?", "What continent is {x} on?",
         "{x} continent?",
         "What continent does {x} belong to?", "In which continent is {x}?"),
        ("the continent that {x} is on",),
        ("Which continent does {x} belong to?", "{x} is on which continent?"),
    ),
    Relation(
        "language", LANGUAGES, "People in {x} speak {y}.",
        ("the language of {x}", "the main language of {x}", "the language spoken in {x}"),
        ("What language do people speak in {x}?", "Which language is spoken in {x}?",
         "What do people in {x} speak?",
         "{x} language?", "What language is spoken in {x}?", "Which language do they speak in {x}?"),
        ("the language people speak in {x}",),
        ("Which language do people in {x} speak?", "What language do they speak in {x}?"),
    ),
    Relation(
        "currency", CURRENCIES, "The currency of {x} is the {y}.",
        ("the currency of {x}", "{x}'s currency", "the money of {x}", "the currency used in {x}"),
        ("Which currency is used in {x}?", "What currency do people use in {x}?",
         "What money do they use in {x}?",
         "{x} currency?", "What is the money in {x} called?", "Which currency does {x} have?"),
        ("the currency in {x}",),
        ("What currency does {x} use?", "Which currency do they use in {x}?"),
    ),
    Relation(
        "symbol", SYMBOLS, "The chemical symbol of {x} is {y}.",
        ("the chemical symbol of {x}", "the chemical symbol for {x}", "the symbol of {x}",
         "the symbol for {x}"),
        ("Which symbol does {x} have?", "{x} symbol?", "How is {x} written in chemistry?",
         "Chemical symbol of {x}?",
         "What symbol stands for {x}?", "Which letters stand for {x}?"),
        ("the symbol of the element {x}",),
        ("Which chemical symbol does {x} have?", "Which symbol stands for {x}?"),
    ),
    Relation(
        "opposite", OPPOSITES, "The opposite of {x} is {y}.",
        ("the opposite of {x}", "the opposite of the word {x}", "the word opposite to {x}"),
        ("What word is the opposite of {x}?", "Opposite of {x}?", "{x} is the opposite of?",
         "The opposite of {x}?",
         "Which word means the opposite of {x}?", "{x} is the opposite of what?"),
        ("the word that is the opposite of {x}",),
        ("Which word is the opposite of {x}?", "What is opposite to {x}?"),
    ),
    Relation(
        "colour", COLOURS, "The colour of {x} is {y}.",
        ("the colour of {x}", "the color of {x}", "the usual colour of {x}"),
        ("What colour is {x}?", "What color is {x}?", "Which colour does {x} have?", "Which color is {x}?",
         "{x} has what colour?", "Colour of {x}?"),
        ("the usual color of {x}",),
        ("Which colour is {x}?", "What colour does {x} have?"),
    ),
    Relation(
        "sound", SOUNDS, "A {x} says {y}.",
        ("the sound of a {x}", "the sound a {x} makes", "the noise a {x} makes"),
        ("What does a {x} say?", "What sound does a {x} make?", "Which sound does a {x} make?",
         "How does a {x} sound?",
         "What noise does a {x} make?", "A {x} says what?"),
        ("the noise of a {x}",),
        ("Which noise does a {x} make?", "A {x} makes what sound?"),
    ),
    Relation(
        "young", YOUNG, "A young {x} is called a {y}.",
        ("the name of a young {x}", "the word for a baby {x}", "the name for a baby {x}"),
        ("What is a baby {x} called?", "What do you call a young {x}?", "How is a young {x} called?",
         "Baby {x}?",
         "A baby {x} is called?", "What is the young of a {x} called?"),
        ("the word for a young {x}",),
        ("What is a young {x} called?", "What do you call a baby {x}?"),
    ),
    Relation(
        "legs", LEGS, "A {x} has {y} legs.",
        ("the number of legs of a {x}", "how many legs a {x} has", "the number of legs a {x} has"),
        ("How many legs does a {x} have?", "How many legs has a {x}?", "A {x} has how many legs?",
         "{x} legs?",
         "What number of legs does a {x} have?", "How many legs are on a {x}?"),
        ("how many legs there are on a {x}",),
        ("How many legs has a {x} got?", "With how many legs does a {x} walk?"),
    ),
    Relation(
        "after", AFTER, "{y} comes after {x}.",
        ("the one after {x}", "the one that comes after {x}", "the one that follows {x}"),
        ("What comes after {x}?", "What follows {x}?", "What is after {x}?", "What is next after {x}?",
         "After {x} comes what?", "{x} is followed by?"),
        ("the next one after {x}",),
        ("What comes right after {x}?", "{x} is followed by what?"),
    ),
    Relation(
        "before", BEFORE, "{y} comes before {x}.",
        ("the one before {x}", "the one that comes before {x}", "the one that is before {x}"),
        ("What comes before {x}?", "What is before {x}?", "What is right before {x}?",
         "Before {x} comes what?",
         "What goes before {x}?", "Which one is before {x}?"),
        ("the one that goes before {x}",),
        ("What comes right before {x}?", "Which one comes before {x}?"),
    ),
    Relation(
        "planet", PLANETS, "The {x} planet from the Sun is {y}.",
        ("the {x} planet", "the {x} planet from the Sun", "the name of the {x} planet"),
        ("Which planet is the {x} from the Sun?", "Which is the {x} planet?",
         "Which planet is {x} from the Sun?",
         "{x} planet?", "What planet is the {x} one?", "Which planet comes {x}?"),
        ("the {x} planet of the Sun",),
        ("What planet is the {x} from the Sun?", "Which planet is the {x} one?"),
    ),
)  # fmt: skip
