# SPDX-License-Identifier: Apache-2.0
"""Florence-2's tasks: their questions in words, and the boxes, polygons and labels of their answers.

Paper: Florence-2 (2311.06242). A place in an answer is a token <loc_0> to <loc_999>, a thousandth of the image's width
or height. Questions and parsed answers are those of transformers' `Florence2Processor`.
Invariant: neither Pillow nor torch is imported, and parsing takes time proportional to the answer's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.errors import ValidationError
from quire.models.json_object import JsonObject

INPUT = "{input}"
"""Stands in a question for the text beside the task."""
TEXT, QUADS, BOXES, PHRASES, POLYGONS, PLACES, EITHER = (
    *("pure_text", "ocr", "description_with_bboxes", "phrase_grounding"),
    *("polygons", "bboxes", "description_with_bboxes_or_polygons"),
)
"""Forms of answers, by transformers' names."""


class Task(NamedTuple):
    """Question of a task, with `INPUT` if a text belongs to it, and the form of its answer."""

    question: str
    form: str


TASKS = {
    "<OCR>": Task("What is the text in the image?", TEXT),
    "<OCR_WITH_REGION>": Task("What is the text in the image, with regions?", QUADS),
    "<CAPTION>": Task("What does the image describe?", TEXT),
    "<DETAILED_CAPTION>": Task("Describe in detail what is shown in the image.", TEXT),
    "<MORE_DETAILED_CAPTION>": Task("Describe with a paragraph what is shown in the image.", TEXT),
    "<OD>": Task("Locate the objects with category name in the image.", BOXES),
    "<DENSE_REGION_CAPTION>": Task("Locate the objects in the image, with their descriptions.", BOXES),
    "<REGION_PROPOSAL>": Task("Locate the region proposals in the image.", PLACES),
    "<CAPTION_TO_PHRASE_GROUNDING>": Task(f"Locate the phrases in the caption: {INPUT}", PHRASES),
    "<REFERRING_EXPRESSION_SEGMENTATION>": Task(f"Locate {INPUT} in the image with mask", POLYGONS),
    "<REGION_TO_SEGMENTATION>": Task(f"What is the polygon mask of region {INPUT}", POLYGONS),
    "<OPEN_VOCABULARY_DETECTION>": Task(f"Locate {INPUT} in the image.", EITHER),
    "<REGION_TO_CATEGORY>": Task(f"What is the region {INPUT}?", TEXT),
    "<REGION_TO_DESCRIPTION>": Task(f"What does the region {INPUT} describe?", TEXT),
    "<REGION_TO_OCR>": Task(f"What text is in the region {INPUT}?", TEXT),
}

_BINS = 1000
_PLACE = r"<loc_\d{1,4}>"
_ONE = re.compile(r"<loc_(\d{1,4})>")
_BOX, _QUAD = (re.compile(_ONE.pattern * count) for count in (4, 8))
_RUN = re.compile(rf"((?:{_PLACE})+)(<sep>)?")
_POLYGON = re.compile(r"<poly>(.*?)</poly>")
_MARKS = rf"(?:{_PLACE}|<sep>|<poly>|</poly>){{4,}}"
_OUTLINES, _OUTLINED = re.compile(_MARKS), re.compile(f"[^<]+{_MARKS}")
_PLACED = rf"(?:{_PLACE}){{4,}}"
_BOXES, _BOXED = re.compile(_PLACED), re.compile(f"[^<]+{_PLACED}")
_LABEL_END = re.compile(r"<loc_|<poly>")
ENDS = ("<s>", "</s>", "<pad>")
"""Tokens that are no part of an answer."""


@dataclass(frozen=True)
class AnswerRules:
    """Rules of a checkpoint (`post_processor_config` of processor_config.json).

    Args:
        banned: phrases of a caption that get no boxes.
        least_area: least area of a line of text, as a share of the image's.
    """

    banned: frozenset[str] = frozenset()
    least_area: float = 0.0

    @staticmethod
    def of(processor: JsonObject) -> AnswerRules:
        """Return the rules of processor_config.json. Raises ModelLoadError: a value is malformed."""
        own = processor.child("post_processor_config")
        lines, phrases = own.child(QUADS), own.child(PHRASES)
        lines.only("PATTERN", "(.+?)" + r"<loc_(\d+)>" * 8)
        named = phrases.texts("banned_grounding_tokens") if "banned_grounding_tokens" in phrases else ()
        return AnswerRules(frozenset(named), lines.number("AREA_THRESHOLD", 0.0))


NO_RULES = AnswerRules()


class Question(NamedTuple):
    """Task of a prompt, and the prompt in words."""

    task: str
    text: str


def read_question(prompt: str) -> Question | None:
    """Return the question of a prompt with a task; None: the prompt names none.

    Raises:
        ValidationError: it has several tasks, a text beside one that takes none, or none beside one that needs it.
    """
    tasks = [name for name in TASKS if name in prompt]
    if not tasks:
        return None
    if len(tasks) > 1:
        raise ValidationError(
            f"the prompt has {len(tasks)} tasks, {' and '.join(tasks)}; ask one", param="prompt"
        )
    (task,), beside = tasks, prompt.replace(tasks[0], "").strip()
    question = TASKS[task].question
    takes_text = INPUT in question
    if takes_text != bool(beside):
        wanted, got = ("a text", "none") if takes_text else ("no text", repr(beside[:60]))
        raise ValidationError(
            f"{task} takes {wanted} beside it, got {got}; tasks with a text are {_names(True)}, tasks without one "
            f"{_names(False)}",
            param="prompt",
        )
    return Question(task, question.replace(INPUT, beside))


def _names(takes_text: bool) -> str:
    return ", ".join(name for name, task in TASKS.items() if (INPUT in task.question) == takes_text)


def florence2_answer(
    task: str, text: str, size: tuple[int, int], rules: AnswerRules = NO_RULES
) -> dict[str, Any]:
    """Return a task's answer in parsed form, as {task: answer}.

    The answer of a task about text is that text. Others are objects of lists: `bboxes` [x0, y0, x1, y1], `quad_boxes`
    of four corners, or `polygons`, a list of outlines [x, y, ...] per label, with `labels`; of
    <OPEN_VOCABULARY_DETECTION> `bboxes`, `bboxes_labels`, `polygons` and `polygons_labels`. Numbers are pixels.

    Args:
        task: for example "<OD>".
        text: text of the model's answer, with its places.
        size: (width, height) of the image, as `PIL.Image.Image.size`.
        rules: the checkpoint's.

    Raises:
        ValidationError: the task or the size is none.
    """
    if task not in TASKS:
        raise ValidationError(f"task is {task!r:.80}; tasks are {', '.join(TASKS)}", param="task")
    if len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise ValidationError(f"size must be the image's width and height, got {size!r:.80}", param="size")
    form = TASKS[task].form
    for end in ENDS[:2] if form == TEXT else ENDS:
        text = text.replace(end, "")
    return {task: text.strip() if form == TEXT else _FORMS[form](text, size, rules)}


def _quads(text: str, size: tuple[int, int], rules: AnswerRules) -> dict[str, Any]:
    """Return lines of text, each before the eight places of its corners."""
    least = size[0] * size[1] * rules.least_area
    found = [(_pixels(bins, size), label.strip()) for label, bins in _lines(text)]
    found = [(quad, label) for quad, label in found if not least or _area(quad) >= least]
    return {"quad_boxes": [quad for quad, _ in found], "labels": [label for _, label in found]}


def _lines(text: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what stands before each eight places, at least one character of one line, and the places."""
    start = 0
    while (found := _QUAD.search(text, start + 1)) is not None:
        line = text.rfind("\n", start, found.start()) + 1
        if line > start:
            start = line
            continue
        yield text[start : found.start()], found.groups()
        start = found.end()


def _area(quad: Sequence[int]) -> float:
    """Return transformers' area of corners, which leaves out the side from the last to the first."""
    x, y = quad[0::2], quad[1::2]
    return 0.5 * abs(sum(x[i] * y[i + 1] - x[i + 1] * y[i] for i in range(3)))


def _boxes(text: str, size: tuple[int, int], _: AnswerRules) -> dict[str, Any]:
    """Return each box with the label before it, of which only the ASCII characters count."""
    found = [(box, _ascii(label)) for label, boxes in _labeled(_phrases(_BOXED, text), size) for box in boxes]
    return {"bboxes": [box for box, _ in found], "labels": [label for _, label in found]}


def _bare_boxes(text: str, size: tuple[int, int], _: AnswerRules) -> dict[str, Any]:
    """Return boxes without labels."""
    boxes = [box for run in _BOXES.finditer(text) for box in _boxes_of(run.group(), size)]
    return {"bboxes": boxes, "labels": [""] * len(boxes)}


def _grounded(text: str, size: tuple[int, int], rules: AnswerRules) -> dict[str, Any]:
    """Return each box of a caption's phrases."""
    kept = [pair for pair in _labeled(_phrases(_BOXED, text), size) if pair[0] not in rules.banned]
    found = [(box, _ascii(label)) for label, boxes in kept for box in boxes]
    return {"bboxes": [box for box, _ in found], "labels": [label for _, label in found]}


def _bare_polygons(text: str, size: tuple[int, int], _: AnswerRules) -> dict[str, Any]:
    """Return polygons without labels."""
    return _as_lists(_outlined((run.group() for run in _OUTLINES.finditer(text)), size))


def _boxes_or_polygons(text: str, size: tuple[int, int], rules: AnswerRules) -> dict[str, Any]:
    """Return polygons with their labels if the answer has a mark of one, otherwise boxes."""
    boxes: dict[str, Any] = {"bboxes": [], "labels": []}
    polygons: dict[str, Any] = {"polygons": [], "labels": []}
    if "<poly>" in text:
        polygons = _as_lists(_outlined(_phrases(_OUTLINED, text), size))
    else:
        boxes = _boxes(text, size, rules)
    return {
        "bboxes": boxes["bboxes"],
        "bboxes_labels": boxes["labels"],
        "polygons": polygons["polygons"],
        "polygons_labels": polygons["labels"],
    }


_FORMS = {
    QUADS: _quads,
    BOXES: _boxes,
    PHRASES: _grounded,
    POLYGONS: _bare_polygons,
    PLACES: _bare_boxes,
    EITHER: _boxes_or_polygons,
}


def _phrases(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Yield the matches of a pattern that begins with characters other than '<', of which one attempt each is made."""
    start = 0
    while start < len(text):
        found = pattern.match(text, start)
        if found is not None:
            yield found.group()
            start = found.end()
            continue
        start = text.find("<", start) + 1
        if not start:
            return


def _labeled(phrases: Iterator[str], size: tuple[int, int]) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the label of each phrase, and the boxes behind it."""
    for phrase in phrases:
        label = _label(phrase)
        if label is not None:
            yield label, _boxes_of(phrase, size)


def _outlined(phrases: Iterator[str], size: tuple[int, int]) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield a label and the outlines of each instance in some phrases."""
    for phrase in phrases:
        label = _label(_without_first_place(phrase))
        if label is None:
            continue
        is_marked = "<poly>" in phrase and "</poly>" in phrase
        for instance in _POLYGON.findall(phrase) if is_marked else [phrase]:
            runs = [run for run in _RUN.finditer(instance) if run[2] or run.end() == len(instance)]
            if runs:
                yield label, [_outline(run[1], size) for run in runs]


def _without_first_place(phrase: str) -> str:
    first = _ONE.match(phrase)
    return phrase if first is None else phrase[first.end() :]


def _label(phrase: str) -> str | None:
    """Return the text before the first place or polygon, None if it has several lines or nothing follows it."""
    end = _LABEL_END.search(phrase)
    if end is None:
        return None
    label = phrase[: end.start()]
    return None if "\n" in label.lstrip() else label.strip()


def _boxes_of(phrase: str, size: tuple[int, int]) -> list[list[int]]:
    return [_pixels(found.groups(), size) for found in _BOX.finditer(phrase)]


def _outline(run: str, size: tuple[int, int]) -> list[int]:
    """Return the corners of an outline; a last number without its partner is dropped."""
    bins = _ONE.findall(run)
    return _pixels(bins[: len(bins) // 2 * 2], size)


def _pixels(bins: Sequence[str], size: tuple[int, int]) -> list[int]:
    """Return the pixels in the middle of bins [x, y, x, y, ...], rounded down in float32 as by transformers."""
    per_bin = np.array(size, np.float64) / _BINS
    middles = np.array(list(map(int, bins)), np.float32).reshape(-1, 2) + np.float32(0.5)
    found: list[int] = (middles * per_bin.astype(np.float32)).astype(np.int64).reshape(-1).tolist()
    return found


def _as_lists(outlined: Iterator[tuple[str, list[list[int]]]]) -> dict[str, Any]:
    found = list(outlined)
    return {"polygons": [outlines for _, outlines in found], "labels": [label for label, _ in found]}


def _ascii(label: str) -> str:
    return label.encode("ascii", "ignore").decode("ascii")
