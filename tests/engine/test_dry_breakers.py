# SPDX-License-Identifier: Apache-2.0
"""DRY sequence breakers as tokens, against a search of every token's text."""

from __future__ import annotations

import pytest

from quire.engine.tokenizer_cache import MAX_HEADS, TokenizerContext, dry_breakers
from quire.errors import ValidationError
from quire.sampling_extras import DRY_SEQUENCE_BREAKERS
from quire.sampling_params import SamplingParams
from tests.engine.tokenizer_kinds import KINDS, Kind
from tests.fixtures.folded import folded


def get_tokenizer_context(kind: Kind) -> TokenizerContext:
    return TokenizerContext(kind.tokenizer, [], None, kind.num_ids)


def expected_forms(kind: Kind, breaker: str) -> set[tuple[int, tuple[int, ...]]]:
    """(head, tail) by llama.cpp's definition: tokens with all of it, or that end in its beginning, and the rest."""
    found = set()
    for token_id in range(kind.num_ids):
        text = kind.backend.decode([token_id], skip_special_tokens=False)
        if breaker in text:
            found.add((token_id, ()))
            continue
        for size in range(1, len(breaker)):
            if text.endswith(breaker[:size]):
                rest = kind.tokenizer.encode(breaker[size:], add_special_tokens=False)
                found.add((token_id, tuple(rest[:20])))
    return found


@folded("name", KINDS)
def test_breakers_are_the_tokens_that_spell_them(name: str) -> None:
    kind = Kind(name)
    texts = ["a", "th", "he.", "an", "n't", "日本", "</s>", "a</s>", ",", "zzz", "ab" * 20]
    for text in texts:
        params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[text])
        forms = dry_breakers(params, get_tokenizer_context(kind))
        found = [(head, form.tail) for form in forms for head in form.heads]
        assert set(found) == expected_forms(kind, text), text


def test_default_breakers_are_llamas() -> None:
    kind = Kind("byte_level")
    default = dry_breakers(SamplingParams(dry_multiplier=1.0), get_tokenizer_context(kind))
    named = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=list(DRY_SEQUENCE_BREAKERS))
    assert default == dry_breakers(named, get_tokenizer_context(kind)) != ()
    none = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[])
    assert dry_breakers(none, get_tokenizer_context(kind)) == ()


def test_breakers_without_a_tokenizer_are_refused_if_named() -> None:
    tokenizer_context = TokenizerContext(None, [], None, 9)
    assert dry_breakers(SamplingParams(dry_multiplier=1.0), tokenizer_context) == ()
    with pytest.raises(ValidationError, match="need a tokenizer"):
        dry_breakers(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["x"]), tokenizer_context)


def test_breakers_that_stand_everywhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.tokenizer_cache.MAX_HEADS", 1)
    assert MAX_HEADS > 1
    with pytest.raises(ValidationError, match="the limit is 1"):
        dry_breakers(
            SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["a", "b"]),
            get_tokenizer_context(Kind("byte_level")),
        )
