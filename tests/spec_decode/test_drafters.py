# SPDX-License-Identifier: Apache-2.0
"""Drafters against brute force over the texts that they have seen."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.spec_decode.drafter import DRAFTERS, Draft, Drafter, Text
from quire.spec_decode.ngram import MOST_CANDIDATES, NgramDrafter, NgramIndex
from quire.spec_decode.recorded import CORPUS_TOKENS, Corpora, Corpus, RecordedDrafter
from quire.spec_decode.suffix import SHORTEST, SuffixDrafter
from quire.spec_decode.suffix_automaton import SuffixAutomaton

few_tokens = st.lists(st.integers(0, 2), max_size=60)


def text(
    tokens: list[int], name: str = "a", prompt: int = 0, owner: tuple[str, str | None] = ("", None)
) -> Text:
    return Text(name, np.array(tokens, dtype=np.int32), prompt, owner)


def config(**given: Any) -> EngineConfig:
    return EngineConfig.from_args(speculative_config={"method": "auto", **given})


def match_lengths(tokens: list[int], longest: int) -> dict[int, int]:
    """End of an earlier run of tokens -> how many of its last tokens are the text's last ones."""
    lengths = {}
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, longest) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        lengths[end] = length
    return lengths


@given(few_tokens, st.integers(1, 3), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None)
def test_ngram_finds_the_longest_of_the_latest_matches(
    tokens: list[int], shortest: int, more: int, draw: random.Random
) -> None:
    """However many tokens are new at a time."""
    index, longest = NgramIndex(shortest, shortest + more), shortest + more
    known = 0
    while known < len(tokens):
        known = min(known + draw.choice([1, 1, 2, 30]), len(tokens))
        array = np.array(tokens[:known], dtype=np.int32)
        index.extend(array)
        matches = {end: n for end, n in match_lengths(tokens[:known], longest).items() if n >= shortest}
        latest = sorted(matches)[-MOST_CANDIDATES:]
        best = max(latest, key=lambda end: (matches[end], end), default=0)
        assert index.find(array) == (best, matches.get(best, 0))


def test_ngram_indexes_grow_with_their_texts() -> None:
    draw = random.Random(5)
    tokens = np.array(
        [draw.randrange(50_000) for _ in range(5000)] + [1, 2, 3] + [7] * 9 + [1, 2, 3], np.int32
    )
    index = NgramIndex(3, 8)
    for known in (100, 101, 2000, len(tokens)):
        index.extend(tokens[:known])
    assert index.find(tokens) == (5003, 3)


def test_ngram_copies_round_and_round() -> None:
    drafter = NgramDrafter(config())
    assert drafter.propose([text([9, 1, 2, 1, 2])], 5) == [Draft([1, 2, 1, 2, 1], 2)]
    assert drafter.propose([text([9, 1, 2, 1, 2, 8])], 5) == [Draft([])]


@given(st.lists(few_tokens, min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None)
def test_automaton_accepts_exactly_the_substrings_of_its_texts(
    texts: list[list[int]], draw: random.Random
) -> None:
    """Texts grow side by side, and the state of each is that of the longest end which was there before, or of all."""
    automaton, ends = SuffixAutomaton(), [0] * len(texts)
    waiting = [number for number, tokens in enumerate(texts) for _ in tokens]
    draw.shuffle(waiting)
    written: list[list[int]] = [[] for _ in texts]
    for number in waiting:
        written[number].append(texts[number][len(written[number])])
        ends[number] = automaton.extend(ends[number], written[number][-1])
        assert automaton.length(ends[number]) >= len(written[number])
    runs = {
        tuple(tokens[i:j])
        for tokens in texts
        for i in range(len(tokens))
        for j in range(i + 1, len(tokens) + 1)
    }
    for _ in range(50):
        run = [draw.randrange(4) for _ in range(draw.randrange(1, 8))]
        state, length = 0, 0
        for token_id in run:
            state, length = automaton.advance(state, length, token_id)
        longest = max(n for n in range(len(run) + 1) if n == 0 or tuple(run[-n:]) in runs)
        assert length == longest
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def test_suffix_drafts_from_its_owners_texts() -> None:
    drafter = SuffixDrafter(config())
    drafter.propose([text([5, 1, 2, 3, 4], "a", 1, ("x", None))], 3)
    drafter.forget("a")
    drafts = drafter.propose(
        [
            text([9, 1, 2], "b", 1, ("x", None)),
            text([9, 1, 2], "c", 1, ("y", None)),
            text([9, 1, 2], "d", 1, ("x", "salt")),
            text([1, 2], "e", 2, ("x", None)),
        ],
        8,
    )
    assert drafts == [Draft([3, 4], 2), Draft([]), Draft([]), Draft([])]


@given(st.lists(few_tokens, max_size=12), few_tokens)
@settings(derandomize=True, deadline=None)
def test_suffix_drafts_an_earlier_continuation(outputs: list[list[int]], tokens: list[int]) -> None:
    """Behind an end of the text of at least the length that it says, and through generations of automata."""
    drafter = SuffixDrafter(config())
    drafter._corpora = Corpora(80)
    for number, output in enumerate(outputs):
        drafter.propose([text(output, str(number))], 4)
        drafter.forget(str(number))
    for known in range(len(tokens) + 1):
        (draft,) = drafter.propose([text(tokens[:known], "last")], 4)
        if draft.token_ids:
            assert draft.strength >= SHORTEST
            follows = (*tokens[:known][-draft.strength :], draft.token_ids[0])
            sources = [*outputs, tokens[:known]]
            assert any(
                follows == tuple(source[i : i + len(follows)])
                for source in sources
                for i in range(len(source))
            )


def test_corpus_evicts_the_oldest_and_a_running_text_is_in_both() -> None:
    drafter = SuffixDrafter(config())
    drafter._corpora = Corpora(40)
    said = list(range(100, 118))
    for known in range(1, 26):  # the automaton becomes the old one in the middle of it
        drafter.propose([text((said + said)[:known], "a")], 4)
    (draft,) = drafter.propose([text((said + said)[:26], "a")], 4)
    assert draft == Draft(said[8:12], 8)
    for number in range(20):
        drafter.propose([text([number] * 9 + [number + 30] * 9, "b")], 4)
        drafter.forget("b")
    assert drafter.propose([text(said[:5], "c")], 4) == [Draft([])]


def test_memory_is_bounded_for_any_owners() -> None:
    drafter, draw = SuffixDrafter(config()), random.Random(1)
    drafter._corpora = Corpora(1000)
    for number in range(300):
        output = [draw.randrange(99) for _ in range(40)]
        drafter.propose([text(output, "a", owner=(str(number % 30), None))], 4)
        drafter.forget("a")
        corpora = drafter._corpora._by_owner.values()
        assert sum(corpus.num_tokens + CORPUS_TOKENS for corpus in corpora) == drafter._corpora.num_tokens
        assert drafter._corpora.num_tokens <= 1000 + 40


def test_many_owners_take_little_and_are_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has said one token, as clients may that give every request a salt of its own."""
    drafter, looked_at = SuffixDrafter(config()), [0]
    drafter._corpora = Corpora(1000)

    def counted(corpus: Corpus) -> int:
        looked_at[0] += 1
        return corpus.young.num_tokens + corpus.old.num_tokens

    monkeypatch.setattr(Corpus, "num_tokens", property(counted))
    for number in range(1000):
        drafter.propose([text([7], "a", owner=("", str(number)))], 4)
        drafter.forget("a")
    assert len(drafter._corpora) <= 1000 // (CORPUS_TOKENS + 1) + 1
    assert looked_at[0] <= 3 * 1000


def test_a_text_runs_on_in_a_corpus_that_was_forgotten() -> None:
    """A running text extends its evicted corpus, whose tokens count neither in total nor for its owner's new corpus."""
    drafter = SuffixDrafter(config())
    drafter._corpora = Corpora(100)
    said = [5, 6, 7, 8] * 10
    drafter.propose([text(said, "a", owner=("x", None))], 4)
    drafter.propose([text([1] * 90, "b", owner=("y", None))], 4)
    drafter.propose([text([2], "c", owner=("z", None))], 4)
    drafter.propose([text([3], "d", owner=("x", None))], 4)
    (draft,) = drafter.propose([text(said + said, "a", owner=("x", None))], 4)
    assert draft.token_ids == said[:4]
    corpora = drafter._corpora._by_owner.values()
    assert sum(corpus.num_tokens + CORPUS_TOKENS for corpus in corpora) == drafter._corpora.num_tokens < 100


def test_recorded_drafts_have_the_requested_acceptance_rate(tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    output = list(range(1000))
    path.write_text(json.dumps([{"prompt_token_ids": [7, 8], "token_ids": output}]))
    given = {"method": "recorded", "model": str(path), "synthetic_acceptance_rate": 0.7}
    drafter = RecordedDrafter(with_vocabulary(given))
    drafts = [drafter.propose([text([7, 8, *output[:known]], prompt=2)], 1)[0] for known in range(1000)]
    right = [draft.token_ids[0] == token_id for draft, token_id in zip(drafts, output, strict=True)]
    assert 0.65 < sum(right) / 1000 < 0.75
    assert drafter.propose([text([7, 8, *output], prompt=2)], 4) == [Draft([])]
    assert drafter.propose([text([8, 8, 0], "other", prompt=2)], 4) == [Draft([])]


def with_vocabulary(given: dict[str, Any]) -> EngineConfig:
    settings = EngineConfig.from_args(speculative_config=given).speculative
    return SimpleNamespace(speculative=settings, arch=SimpleNamespace(vocab_size=5000))  # type: ignore[return-value]


@pytest.mark.parametrize("content", [None, "{}", "[3]"])
def test_a_file_that_has_no_recorded_outputs_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "outputs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="recorded outputs"):
        RecordedDrafter(with_vocabulary({"method": "recorded", "model": str(path)}))


def test_built_in_drafters_declare_their_keys() -> None:
    made: list[type[Drafter]] = [NgramDrafter, SuffixDrafter, RecordedDrafter]
    assert [DRAFTERS.resolve(name) for name in ("ngram", "suffix", "recorded")] == made
