# SPDX-License-Identifier: Apache-2.0
"""Prompts that ask to fill in the middle, for every layout of marks."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_files import BYTE_OF_CHAR
from quire.entrypoints.fill_in import LAYOUTS, PREFIX, SUFFIX, FillIn, FillInLayout
from quire.errors import ValidationError


def tokenizer_with(*specials: str) -> Tokenizer:
    backend = Backend(models.BPE(vocab=BYTE_OF_CHAR, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return Tokenizer(backend, {}, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(LAYOUTS.index(layout)))
def test_marks_stand_around_both_texts(layout: FillInLayout) -> None:
    marks = [part for part in layout.parts if isinstance(part, str)]
    ends = [] if layout.end is None else [layout.end]
    tokenizer = tokenizer_with(*marks, *ends)
    fill_in = FillIn(tokenizer)
    texts = {PREFIX: "def f(x):", SUFFIX: f" return {marks[0]}"}
    ids = fill_in.encode(texts[PREFIX], texts[SUFFIX], add_special_tokens=True)
    expected = "".join(part if isinstance(part, str) else texts[part] for part in layout.parts)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert [ids.count(tokenizer.id_of(mark)) for mark in marks] == [1] * len(marks), (
        "what is spelled out is no mark"
    )
    assert fill_in.end_ids == [tokenizer.id_of(end) for end in ends]


def test_a_model_without_marks_is_refused() -> None:
    for specials in ((), ("<fim_prefix>", "<fim_suffix>")):
        with pytest.raises(ValidationError, match="fill-in-the-middle model"):
            FillIn(tokenizer_with(*specials))
