# SPDX-License-Identifier: Apache-2.0
"""The incremental detokenizer against decoding everything at once, and the stop checker against str.find."""

from __future__ import annotations

from itertools import accumulate, chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.detokenizer import IncrementalDetokenizer, StopChecker
from quire.engine.special_stops import SpecialStopChecker, make_stop_checker
from quire.engine.tokenizer import REPLACEMENT
from tests.engine.tokenizer_kinds import KINDS, SPECIALS, Kind

# U+2581 in byte tokens is left out: after ByteFallback, a Metaspace step takes it for its own.
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\u2581" + REPLACEMENT)
WITH_BYTES = ["byte_level", "llama_2", "gemma", "unigram_with_bytes", "greedy_strip"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


@pytest.fixture(scope="module", params=WITH_BYTES)
def kind_with_bytes(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


def deltas(
    kind: Kind, prompt: list[int], ids: list[int], sizes: list[int], *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(kind.tokenizer, prompt, skip_special_tokens=skip)
    pieces, position = [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    return [*pieces, detokenizer.flush()]


def valid_ids(kind: Kind) -> st.SearchStrategy[list[int]]:
    """Tokens whose bytes are valid UTF-8: whole ones, special ones, and characters spelled in bytes."""
    choices = [
        st.sampled_from(kind.whole_ids).map(lambda i: [i]),
        st.sampled_from(sorted(kind.special_ids)).map(lambda i: [i]),
    ]
    if kind.byte_ids:
        choices.append(CHARACTERS.map(kind.spell))
    return st.lists(st.one_of(choices), max_size=25).map(lambda parts: list(chain.from_iterable(parts)))


def any_ids(kind: Kind) -> st.SearchStrategy[list[int]]:
    """Ids beyond the vocabulary, too."""
    return st.lists(st.integers(0, kind.num_ids + 1), max_size=60)


SIZES = st.lists(st.integers(0, 5), max_size=20)


@pytest.mark.item(38, 58)
@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=SIZES)
def test_joined_deltas_equal_the_decoded_text(
    kind: Kind, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    ids = data.draw(valid_ids(kind))
    whole = kind.backend.decode(ids, skip_special_tokens=skip)
    assert REPLACEMENT not in whole
    assert (
        "".join(deltas(kind, [], ids, sizes, skip=skip))
        == whole
        == kind.tokenizer.decode(ids, skip_special_tokens=skip)
    )


@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_text_after_prompt_is_rest_of_whole_text(kind: Kind, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(valid_ids(kind))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    before = kind.tokenizer.decode(prompt, skip_special_tokens=skip).removesuffix(REPLACEMENT)
    whole = kind.tokenizer.decode(ids, skip_special_tokens=skip)
    assert before + "".join(deltas(kind, prompt, output, [1] * len(output), skip=skip)) == whole


@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=SIZES)
def test_invalid_bytes_too_are_the_same_streamed_and_whole(
    kind: Kind, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    ids = data.draw(any_ids(kind))
    whole = kind.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(kind, [], ids, sizes, skip=skip)) == whole
    if kind.name == "byte_level":
        assert whole == kind.backend.decode(ids, skip_special_tokens=skip)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(data=st.data())
def test_no_delta_is_undone_by_later_tokens(kind: Kind, data: st.DataObject) -> None:
    ids = data.draw(any_ids(kind))
    whole = kind.tokenizer.decode(ids)
    assert all(whole.startswith(text) for text in accumulate(deltas(kind, [], ids, [1] * len(ids))))


@settings(derandomize=True, max_examples=15, deadline=None)
@given(text=st.text(CHARACTERS, max_size=60))
def test_a_character_is_given_out_whole_with_its_last_byte(kind_with_bytes: Kind, text: str) -> None:
    ids = kind_with_bytes.spell("." + text)
    pieces = deltas(kind_with_bytes, ids[:1], ids[1:], [1] * len(ids))
    expected = [piece for char in text for piece in [""] * (len(char.encode()) - 1) + [char]]
    assert pieces == [*expected, "", "", ""]


@settings(derandomize=True, max_examples=15, deadline=None)
@given(data=st.data())
def test_bytes_of_each_token_joined_are_the_text(kind: Kind, data: st.DataObject) -> None:
    detokenizer = IncrementalDetokenizer(kind.tokenizer, [], skip_special_tokens=False)
    text, joined = "", b""
    for token_id in data.draw(any_ids(kind)):
        joined += detokenizer.bytes_of(token_id)
        text += detokenizer.push([token_id])
    assert joined.decode(errors="replace") == text + detokenizer.flush()


def test_an_invalid_byte_costs_one_replacement_and_no_neighbor(kind_with_bytes: Kind) -> None:
    euro, e = kind_with_bytes.spell("€"), kind_with_bytes.spell("é")
    ids = [*e, euro[0], euro[1], *e, euro[2], *kind_with_bytes.spell("日"), e[0]]
    assert "".join(deltas(kind_with_bytes, [], ids, [1] * 20)) == "é\ufffdé\ufffd日\ufffd"
    assert kind_with_bytes.tokenizer.decode(ids) == "é\ufffdé\ufffd日\ufffd"


def test_a_token_alone_keeps_its_leading_space_and_its_bytes() -> None:
    llama, bert = Kind("llama_2"), Kind("wordpiece")
    the = llama.backend.token_to_id("▁the")
    assert (llama.tokenizer.token_text(the), llama.tokenizer.token_bytes(the)) == (" the", b" the")
    first_byte = llama.spell("é")[0]
    assert (llama.tokenizer.token_text(first_byte), llama.tokenizer.token_bytes(first_byte)) == (
        "\ufffd",
        b"\xc3",
    )
    assert bert.tokenizer.token_text(bert.backend.token_to_id("the")) == " the"
    assert bert.tokenizer.token_text(bert.backend.token_to_id("##the")) == "the"
    assert bert.tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("split", range(1, 4))
def test_character_split_between_prompt_and_output_is_completed(kind_with_bytes: Kind, split: int) -> None:
    ids = [*kind_with_bytes.spell("x日" * 20), *kind_with_bytes.spell("🜀")]
    cut = len(ids) - split
    assert "".join(deltas(kind_with_bytes, ids[:cut], ids[cut:], [1] * split)) == "🜀"


@pytest.mark.item(38, 58)
@pytest.mark.parametrize("include", [False, True])
@settings(derandomize=True, max_examples=100, deadline=None)
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


special_stop = st.lists(st.sampled_from(["a", "b", "é", *SPECIALS]), min_size=1, max_size=3).map("".join)


@pytest.mark.parametrize("kind", ["byte_level"], indirect=True)
@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    words=st.lists(st.sampled_from(["a", "b", "c", "é", *SPECIALS]), max_size=8),
    stop=st.lists(special_stop, min_size=1, max_size=3),
    include=st.booleans(),
    num_unarmed=st.sampled_from([0, 0, 3]),
)
def test_special_tokens_stop_where_they_are_hidden(
    kind: Kind, words: list[str], stop: list[str], include: bool, num_unarmed: int
) -> None:
    """Strings with special tokens are found in the text that has them, and others in the text that is given out."""
    tokenizer = kind.tokenizer
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    checker = make_stop_checker(tokenizer, stop, skip_special_tokens=True, include_in_output=include)
    special = [text for text in stop if any(one in text for one in SPECIALS)]
    assert isinstance(checker, SpecialStopChecker) == bool(special)
    pieces = [(i, word in SPECIALS, word) for i, word in enumerate(words)]
    out, found = "", list[tuple[int, int, str]]()
    whole, shown, shown_before = "", "", list[int]()
    first_searched = 0
    for index, is_special, word in pieces:
        armed = index >= num_unarmed
        for char in word:
            shown_before.append(len(shown))
            whole += char
            shown += "" if is_special else char
        for token_id in tokenizer.encode(word, add_special_tokens=False):
            text, hidden = detokenizer.push([token_id]), detokenizer.hidden_text(token_id)
            out += checker.push(text, hidden, armed=armed)
        if not armed:
            first_searched = len(whole)
            continue
        from_shown = shown_before[first_searched] if first_searched < len(whole) else len(shown)
        for text in stop:
            searched, start = (whole, first_searched) if text in special else (shown, from_shown)
            place = searched.find(text, start)
            if place >= 0:
                found.append((shown_before[place] if text in special else place, -len(text), text))
        if found:
            break
    else:
        out += checker.flush()
    start, _, hit = min(found, default=(len(shown), 0, None))
    assert (out, checker.matched) == (shown[:start] + (hit or "" if include else ""), hit)


def test_special_stop_is_plain_where_special_tokens_are_text() -> None:
    tokenizer = Kind("byte_level").tokenizer
    made = make_stop_checker(tokenizer, [SPECIALS[0]], skip_special_tokens=False, include_in_output=False)
    assert type(made) is StopChecker
