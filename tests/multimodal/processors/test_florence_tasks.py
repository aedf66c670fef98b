# SPDX-License-Identifier: Apache-2.0
"""Florence-2's tasks against transformers: questions in words, and parsed answers over generated texts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Florence2Processor
from transformers.processing_utils import ProcessorMixin

from quire import florence2_answer
from quire.errors import StartupError, ValidationError
from quire.models.json_object import JsonObject
from quire.multimodal.processors.florence_tasks import INPUT, TASKS, AnswerRules, read_question
from tests.fixtures.folded import folded

BANNED, LEAST = ["it", "the image"], 0.05
CONFIG: dict[str, dict[str, Any]] = {form: {} for form in {task.form for task in TASKS.values()}}
CONFIG["ocr"] = {"PATTERN": "(.+?)" + r"<loc_(\d+)>" * 8, "AREA_THRESHOLD": LEAST}
CONFIG["phrase_grounding"] = {"banned_grounding_tokens": BANNED}
PLACES = ["<loc_0>", "<loc_7>", "<loc_499>", "<loc_640>", "<loc_999>"]
MARKS = ["<sep>", "<poly>", "</poly>"]
OTHERS = [
    "car",
    " red bus ",
    "the image",
    "it",
    "é",
    "a\nb",
    "\n",
    " ",
    ">",
    "<",
    "<od>",
    "<s>",
    "</s>",
    "<pad>",
]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Florence2Processor:
    """transformers' processor without an image processor and a tokenizer, which parsing does not use."""
    monkeypatch.setattr(ProcessorMixin, "__init__", lambda *_, **__: None)
    tokenizer = SimpleNamespace(all_special_tokens=[], image_token="<image>", image_token_id=9)
    return Florence2Processor(SimpleNamespace(image_seq_length=1), tokenizer, post_processor_config=CONFIG)


def texts(count: int) -> list[str]:
    """Return texts of labels, runs of places and marks, about as models write them, and of any of these."""
    random = np.random.default_rng(8)
    found = []
    for number in range(count):
        pieces: list[str] = []
        for _ in range(random.integers(1, 8)):
            run = list(random.choice(PLACES, random.choice([1, 3, 4, 4, 5, 8, 8, 16, 17])))
            if number % 2:
                run = list(random.choice([*run, *MARKS], len(run)))
            if number % 4 == 1:
                run = ["<poly>", *run, "</poly>"]
            pieces += [*random.choice(OTHERS, random.integers(0, 3)), *run]
        found.append("".join(pieces))
    return found


def test_answers_equal_those_of_transformers(theirs: Florence2Processor) -> None:
    rules = AnswerRules.of(JsonObject("file", {"post_processor_config": CONFIG}))
    random = np.random.default_rng(3)
    answers = 0
    for text, task in zip(texts(120), itertools.cycle(TASKS), strict=False):
        for name in (task, *(one for one in TASKS if TASKS[one].form != TASKS[task].form)):
            size = (int(random.integers(1, 4000)), int(random.integers(1, 4000)))
            wanted = theirs.post_process_generation(text=text, task=name, image_size=size)
            found = florence2_answer(name, text, size, rules)
            assert found == wanted, (name, text, size)
            answers += isinstance(found[name], dict) and any(found[name].values())
    assert answers > 600


def test_questions_equal_those_of_transformers(theirs: Florence2Processor) -> None:
    for name, task in TASKS.items():
        prompts = [f"{name}a {{red}} car", f"two <loc_1>{name} "] if INPUT in task.question else [name]
        for prompt in prompts:
            (wanted,) = theirs._construct_prompts(prompt)
            question = read_question(prompt)
            assert question is not None
            assert (question.task, question.text) == (name, wanted)
    assert read_question("What is <CAPTION >?") is None
    assert theirs.tasks_answer_post_processing_type == {name: task.form for name, task in TASKS.items()}


@folded(
    ("prompt", "words"),
    [
        ("<OD> cars", r"<OD> takes no text beside it, got 'cars'; tasks with a text are <CAPTION_TO_PHRASE_"),
        ("<REGION_TO_OCR> ", r"<REGION_TO_OCR> takes a text beside it, got none; .* without one <OCR>, "),
        ("<OD><OCR>", r"the prompt has 2 tasks, <OCR> and <OD>; ask one"),
    ],
)
def test_a_wrong_prompt_of_a_task_names_the_tasks(prompt: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read_question(prompt)


def test_wrong_arguments_of_an_answer_are_errors() -> None:
    with pytest.raises(ValidationError, match=r"task is '<X>'; tasks are <OCR>, "):
        florence2_answer("<X>", "", (1, 1))
    with pytest.raises(ValidationError, match=r"size must be the image's width and height, got \(0, 1\)"):
        florence2_answer("<OD>", "", (0, 1))
    with pytest.raises(StartupError, match="PATTERN"):
        AnswerRules.of(JsonObject("file", {"post_processor_config": {"ocr": {"PATTERN": "(.*)"}}}))


def test_long_answers_are_parsed_in_linear_time() -> None:
    text = "word " * 40_000 + "\n" * 40_000 + "<loc_1>" * 7
    for task in TASKS:
        (answer,) = florence2_answer(task, text, (640, 480)).values()
        labels = [] if isinstance(answer, str) else answer.get("labels", answer.get("bboxes_labels"))
        assert not any(labels)  # they would have several lines
