# SPDX-License-Identifier: Apache-2.0
"""The least number of tokens of a text is never more than it has, and is only given where that is certain."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.engine.tokenizer import BYTE_TOKENS, max_chars_per_token
from quire.engine.tokenizer import Tokenizer as QuireTokenizer
from tests.engine.conftest import byte_level_tokenizer
from tests.fixtures.folded import folded


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: Metaspace by normalizers, and a token for each byte that has no letter."""
    letters = ["<unk>", *sorted(BYTE_TOKENS), "▁", "a", "b", "▁a", "▁ab", "▁▁", "e"]
    vocab = {token: index for index, token in enumerate(letters)}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def composed() -> Tokenizer:
    """As Qwen 2 has it: characters are composed before they are taken for bytes."""
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def without_some_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


def with_steps_that_drop() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return tokenizer


def with_a_replacement_that_shortens() -> Tokenizer:
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Replace(Regex(" +"), " ")
    return tokenizer


def with_a_split_that_drops() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def with_a_token_that_takes_space_along() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<x>", rstrip=True)])
    return tokenizer


def with_words_that_are_unknown() -> Tokenizer:
    return Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


pieces = st.sampled_from(
    ["ab", " ", "   ", "e\u0301", "ᾂ", unicodedata.normalize("NFD", "ᾂ각"), "<|end|>", "😀"]
)
texts = st.lists(pieces | st.text(max_size=4), max_size=20).map("".join)


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback, composed])
def test_no_text_has_fewer_tokens_than_the_bound(make: Callable[[], Tokenizer]) -> None:
    tokenizer = QuireTokenizer(make(), {}, None)

    @settings(derandomize=True, deadline=None, max_examples=200)
    @given(texts)
    def check(text: str) -> None:
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text))

    check()
    assert tokenizer.min_num_tokens("x" * 10**6) > 10**4


@folded(
    "make",
    [
        without_some_bytes,
        with_steps_that_drop,
        with_a_replacement_that_shortens,
        with_a_split_that_drops,
        with_a_token_that_takes_space_along,
        with_words_that_are_unknown,
    ],
)
def test_text_bound_is_none_if_text_may_vanish(make: Callable[[], Tokenizer]) -> None:
    assert max_chars_per_token(make()) is None
    assert QuireTokenizer(make(), {}, None).min_num_tokens("x" * 10**6) == 0
