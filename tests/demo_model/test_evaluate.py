# SPDX-License-Identifier: Apache-2.0
"""The shipped weights really answer: a sample of the held-out evaluation, through the engine."""

from __future__ import annotations

import pytest

from demo_model import evaluate
from demo_model.cases import cases

SAMPLE = 12
FEWEST_PERCENT = 90.0
"""A sample of 12 a category is several percent off the whole evaluation, whose bound is 95."""


@pytest.mark.more
def test_model_in_the_box_answers_its_facts() -> None:
    found = cases(seed=11, limit=SAMPLE)
    answer = evaluate.answer_with_quire(str(evaluate.ASSETS))
    replies = answer(found)
    table = evaluate.report(found, replies)
    assert table[evaluate.OVERALL]["percent"] >= FEWEST_PERCENT
