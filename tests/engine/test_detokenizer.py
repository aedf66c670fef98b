"""The incremental detokenizer against decoding everything at once, and the stop checker against str.find."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopChecker
from quire.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(null_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(null_model_dir)


def deltas(tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=True)
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*pieces, detokenizer.flush()]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(data=st.data())
def test_joined_deltas_are_the_decoded_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(token, max_size=80))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=20))
    assert "".join(deltas(tokenizer, [], ids, sizes)) == tokenizer.decode(ids)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_no_delta_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = deltas(tokenizer, [], ids, [1] * len(ids))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


def test_prompt_context_is_not_repeated(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("the quick brown"), tokenizer.encode(" fox jumps")
    assert "".join(deltas(tokenizer, prompt, ids, [1] * len(ids))) == " fox jumps"


def test_character_split_between_prompt_and_output_is_completed(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode(char)[0] for char in "x"] + tokenizer.encode("🜀")
    assert len(ids) > 3, "the character must take several tokens"
    assert "".join(deltas(tokenizer, ids[:2], ids[2:], [1] * len(ids))) == "🜀"


def test_invalid_bytes_cost_constant_time_and_are_not_lost(tokenizer: Tokenizer) -> None:
    lone = tokenizer.encode("😀")[0]
    pieces = deltas(tokenizer, [], [lone] * 200, [1] * 200)
    assert "".join(pieces) == tokenizer.decode([lone] * 200)


@pytest.mark.parametrize("include", [False, True])
@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_stop_checker_equals_a_search_of_the_whole(
    include: bool, text: str, stop: list[str], size: int
) -> None:
    checker = StopChecker(stop, include_in_output=include)
    out = ""
    for start in range(0, len(text), size):
        out += checker.push(text[start : start + size])
        if checker.matched is not None:
            break
    else:
        out += checker.flush()
    # The oracle sees the text grow piece by piece too: a stop string is found as soon as it is complete.
    expected, hit = text, None
    for end in range(size, len(text) + size, size):
        found = [(text[:end].find(s), -len(s), s) for s in stop if s in text[:end]]
        if found:
            start, _, hit = min(found)
            expected = text[:start] + (hit if include else "")
            break
    assert (out, checker.matched) == (expected, hit)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["END"], include_in_output=False)
    assert checker.push("a E") == "a "
    assert checker.push("N") == ""
    assert checker.push("x") == "ENx"


def test_unarmed_checker_passes_everything() -> None:
    checker = StopChecker(["b"], include_in_output=False)
    assert checker.push("ab", armed=False) == "ab"
    assert checker.push("ab") == "a"
    assert checker.matched == "b"
