"""The model in the box that guesses what quire-demo says."""

from __future__ import annotations

import pytest

from demo_model.cases import cases
from demo_model.evaluate_companion import GOAL, SEED, mean_accepted_length, with_companion
from demo_model.train_companion import ASSETS

MOST_BYTES, SAMPLE = 1 << 20, 3


@pytest.mark.more
def test_a_guess_gives_several_tokens(restore_threads: None) -> None:
    llm, found = with_companion(8), cases(SEED, SAMPLE)
    for temperature in (0.0, 1.0):
        assert mean_accepted_length(llm, found, temperature) >= GOAL


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*")) < MOST_BYTES
