# SPDX-License-Identifier: Apache-2.0
"""Drafts in the runner, put there by hand; tests/end_to_end/test_drafts.py has them proposed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.worker.cpu import CpuDevice
from quire.worker.verification import count_kept
from tests.worker.harness import POISON, VOCAB_SIZE, Driver, Sequence, toy_runner
from tests.worker.test_model_runner import KINDS, NUM_OUTPUT, alone, params, prompt

tokens = st.integers(0, 2)


@given(st.lists(st.tuples(tokens, tokens, st.booleans())), tokens)
@settings(derandomize=True, deadline=None)
def test_verified_tokens_equal_those_of_single_steps(pairs: list[tuple[int, int, bool]], last: int) -> None:
    """A step after the other: the token sampled behind a right draft is there, and nothing behind a wrong one."""
    sampled = [token for token, _, _ in pairs] + [last]
    drafts = [draft for _, draft, _ in pairs]
    is_bad = [False] + [bad for _, _, bad in pairs]
    expected = 1
    while expected <= len(drafts) and sampled[:expected] == drafts[:expected] and not is_bad[expected]:
        expected += 1
    assert count_kept(sampled, drafts, is_bad) == expected


def drafted(seed: int, kind: int) -> Sequence:
    """A request in steps with drafts, right up to a random place, beside one without."""
    rng, expected = random.Random(seed), alone(9, 2, kind)
    driver = Driver(toy_runner(), seed)
    sequence = driver.submit("a", prompt(9, 2), params(kind))
    driver.submit("b", prompt(5, 3), params(1))
    while len(sequence.output) < NUM_OUTPUT:
        if sequence.output:
            right = expected.token_ids[len(sequence.token_ids) :][: rng.randrange(5)]
            wrong = [rng.randrange(POISON) for _ in range(rng.randrange(3))]
            driver.drafts["a"] = right + wrong
        driver.step(
            {
                name: len(known.token_ids) - known.num_computed_tokens
                for name, known in driver.sequences.items()
            }
        )
    return sequence


@pytest.mark.parametrize("logits_elements", [10_000, 2 * VOCAB_SIZE, VOCAB_SIZE])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_drafts_change_nothing(kind: int, logits_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled at once, or so few at a time that a request's samples are apart."""
    expected = alone(9, 2, kind)
    monkeypatch.setattr(CpuDevice, "logits_elements", logits_elements)
    for seed in range(6):
        sequence = drafted(seed, kind)
        assert sequence.token_ids[: len(expected.token_ids)] == expected.token_ids
        assert sequence.logprobs[: len(expected.logprobs)] == expected.logprobs
        assert sequence.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("drafts", [[POISON, 5], [5, POISON, 5]])
def test_non_finite_logits_behind_a_rejected_draft_are_ignored(drafts: list[int]) -> None:
    driver = Driver(toy_runner())
    sequence = driver.submit("a", prompt(9, 2), params(0))
    driver.step({"a": 9})
    driver.drafts["a"] = drafts
    assert not driver.step({"a": 1}).failed
    driver.generate("a", NUM_OUTPUT)
    assert sequence.token_ids == alone(9, 2, 0).token_ids


def test_request_failing_after_an_accepted_draft_keeps_tokens() -> None:
    """The poison is all that may be sampled, and nothing can be behind it."""
    only_poison = SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[POISON])
    driver = Driver(toy_runner())
    driver.submit("a", prompt(9, 2), only_poison)
    driver.drafts["a"] = [POISON, POISON]
    output = driver.step({"a": 9})
    assert (output.sampled_token_ids, output.failed) == ({"a": [POISON]}, {})
    assert list(driver.step({"a": 1}).failed) == ["a"]
