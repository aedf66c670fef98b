# SPDX-License-Identifier: Apache-2.0
"""Truncation of texts, against that of the tokenizers library, which has no option for a single call."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.pooling.inputs import TruncatingTokenizer
from tests.fixtures.pooling import CLS, LETTERS, SEP, pair_tokenizer


def roberta() -> Backend:
    """Two [SEP] between texts, and no token types."""
    backend = pair_tokenizer()
    backend.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return backend


def decoder() -> Backend:
    """An end token behind a text, as Qwen3-Embedding has it, and nothing between two."""
    backend = pair_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A $B [SEP]", special_tokens=[("[SEP]", SEP)]
    )
    return backend


def bare() -> Backend:
    backend = pair_tokenizer()
    backend.post_processor = processors.ByteLevel()
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "bert": pair_tokenizer,
    "roberta": roberta,
    "decoder": decoder,
    "bare": bare,
}
FITTED = {name: Tokenizer(make(), {}) for name, make in KINDS.items()}
ORACLES = {name: make() for name, make in KINDS.items()}
texts = st.text(LETTERS, min_size=1, max_size=12)


def oracle(kind: str, *given_texts: str, most: int | None, side: str) -> tuple[list[int], list[int]]:
    backend = ORACLES[kind]
    backend.no_truncation()
    if most is not None:
        backend.enable_truncation(most, strategy="longest_first", direction=side)
    encoding = backend.encode(*given_texts)
    return encoding.ids, encoding.type_ids


@settings(deadline=None)
@given(
    st.sampled_from(list(KINDS)), texts, st.none() | st.integers(4, 20), st.sampled_from(["left", "right"])
)
def test_a_text_is_cut_as_the_library_cuts_it(kind: str, text: str, most: int | None, side: str) -> None:
    ids, _ = oracle(kind, text, most=most, side=side)
    assert TruncatingTokenizer(FITTED[kind], side=side).text(text, most).token_ids == ids


@settings(deadline=None)
@given(
    st.sampled_from(list(KINDS)),
    texts,
    texts,
    st.none() | st.integers(6, 24),
    st.sampled_from(["left", "right"]),
)
def test_a_pair_is_cut_as_the_library_cuts_it(
    kind: str, first: str, second: str, most: int | None, side: str
) -> None:
    ids, types = oracle(kind, first, second, most=most, side=side)
    encoded = TruncatingTokenizer(FITTED[kind], side=side).pair(first, second, most)
    assert encoded.token_ids == ids
    start = encoded.second_text_start
    assert types == [int(start is not None and place >= start) for place in range(len(ids))]


@settings(deadline=None)
@given(st.sampled_from(list(KINDS)), texts, st.integers(3, 16))
def test_windows_cover_the_text_in_the_fewest_pieces(kind: str, text: str, most: int) -> None:
    fitter, tokenizer = TruncatingTokenizer(FITTED[kind]), FITTED[kind]
    windows = fitter.windows(text, most)
    special = tokenizer.text_template.size
    inner = [ids[len(tokenizer.text_template.prefix) :][: len(ids) - special] for ids in windows]
    assert [*itertools.chain(*inner)] == tokenizer.encode(text, add_special_tokens=False)
    assert all(len(ids) == most for ids in windows[:-1])
    assert 0 < len(inner[-1]) <= most - special


def test_each_text_of_a_pair_has_its_own_limit() -> None:
    encoded = TruncatingTokenizer(FITTED["bert"]).pair("abcdef", "ghijkl", None, (2, 3))
    assert encoded.token_ids == [CLS, 0, 1, SEP, 6, 7, 8, SEP]
    assert encoded.second_text_start == 4


def test_without_special_tokens_there_is_only_text() -> None:
    fitter = TruncatingTokenizer(FITTED["bert"], add_special_tokens=False)
    assert fitter.text("abc", 2).token_ids == [0, 1]
    encoded = fitter.pair("ab", "c", None)
    assert (encoded.token_ids, encoded.second_text_start) == ([0, 1, 2], 2)


def test_length_without_room_for_text_is_refused() -> None:
    with pytest.raises(ValidationError, match="4 tokens have no room for text beside the 3 special tokens"):
        TruncatingTokenizer(FITTED["bert"]).pair("a", "b", 4)
    with pytest.raises(ValidationError, match="2 tokens have no room"):
        TruncatingTokenizer(FITTED["bert"]).windows("abc", 2)
