# SPDX-License-Identifier: Apache-2.0
"""The included draft model of quire-demo."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo_model.cases import cases
from demo_model.evaluate_companion import GOAL, SEED, mean_accepted_length, with_companion
from demo_model.rejection import Answered, RejectionSampling, expected_steps
from demo_model.train_companion import ASSETS, TEACHER

MOST_BYTES, SAMPLE = 1 << 20, 3


@pytest.mark.more
def test_draft_gives_several_tokens(restore_threads: None) -> None:
    llm, found = with_companion(8), cases(SEED, SAMPLE)
    for temperature in (0.0, 1.0):
        assert mean_accepted_length(llm, found, temperature) >= GOAL


def test_draft_model_file_is_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < MOST_BYTES


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7), st.integers(1, 4))
@settings(derandomize=True, deadline=None)
def test_expected_steps_average_over_all_acceptance_outcomes(chances: list[float], num_guesses: int) -> None:
    """Each token's guess is accepted or not, apart from the others'."""
    expected = 0.0
    for outcome in itertools.product((False, True), repeat=len(chances)):
        weight = math.prod(
            chance if one else 1 - chance for chance, one in zip(chances, outcome, strict=True)
        )
        start = num_steps = 0
        while start < len(outcome):
            right = outcome[start : start + num_guesses]
            start += 1 + (right.index(False) if False in right else len(right))
            num_steps += 1
        expected += weight * num_steps
    assert expected_steps(chances, num_guesses) == pytest.approx(expected)


def test_accepted_share_is_the_overlap_of_both_models() -> None:
    """For a first token, the accepted share summed over likely tokens is the overlap of the models' probabilities."""
    rejection, prompt = RejectionSampling(TEACHER, ASSETS), [5, 6, 7, 8]
    with torch.no_grad():
        p, q = (
            (model(torch.tensor([prompt])).logits[0, -1].double() / 0.8).softmax(-1)
            for model in rejection._models
        )
    likely = p.topk(40).indices.tolist()
    found = sum(float(p[x]) * rejection.accepted(Answered(prompt, [x]), 0.8)[0] for x in likely)
    assert found == pytest.approx(float(torch.minimum(p, q)[likely].sum()), rel=1e-4)
