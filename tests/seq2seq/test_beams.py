# SPDX-License-Identifier: Apache-2.0
"""Beam search with a checkpoint's generation config, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.beam_search.search import TokenRules
from quire.errors import ValidationError
from quire.sampling_params import BeamSearchParams
from tests.seq2seq.tiny import PAD, save, texts

TEXTS = texts(6, 20, 1)
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "summary": (
        "bart",
        {"num_beams": 4, "length_penalty": 2.0, "min_length": 6, "no_repeat_ngram_size": 2, "max_length": 14},
    ),
    "translation": ("marian", {"num_beams": 3, "bad_words_ids": [[PAD]], "max_length": 12}),
    "early": ("t5", {"num_beams": 2, "early_stopping": True, "length_penalty": 0.6, "max_length": 10}),
}


@pytest.mark.parametrize("case", list(CONFIGS))
def test_beams_of_a_generation_config_equal_transformers(tmp_path: Path, case: str) -> None:
    name, options = CONFIGS[case]
    model = save(name, tmp_path)
    for option, value in options.items():
        setattr(model.generation_config, option, value)
    model.generation_config.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
    width = options["num_beams"]
    for text, output in zip(TEXTS, llm.beam_search(list(TEXTS)), strict=True):
        wanted = model.generate(
            torch.tensor([text]),
            num_return_sequences=width,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=False,  # transformers sizes its cache by the encoder's layers
        )
        own = model.generation_config
        num_prompt = 1 + (own.forced_bos_token_id is not None)
        for sequence, ids, score in zip(
            output.sequences, wanted.sequences.tolist(), wanted.sequences_scores.tolist(), strict=True
        ):
            generated = list(sequence.tokens)
            count = len(generated)
            assert generated == ids[num_prompt : num_prompt + count]
            assert all(token in (own.pad_token_id,) for token in ids[num_prompt + count :])
            length = count + num_prompt - 1
            penalty = 1.0 if own.length_penalty is None else own.length_penalty
            assert sequence.cum_logprob / length**penalty == pytest.approx(score, abs=1e-4)
    llm.shutdown()


def test_rules_ban_what_repeats_an_n_gram() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=9, no_repeat_ngram_size=3, min_tokens=5)
    rules = TokenRules(params, frozenset({1}))
    assert rules.banned([4, 5, 6, 4, 5]) == {6}
    assert rules.banned([4, 5]) == {1}
    assert rules.banned([7, 8, 9, 10, 11]) == set()


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_tokens must be an integer in \[0, 4\], got 5"):
        BeamSearchParams(beam_width=1, max_tokens=4, min_tokens=5)
    with pytest.raises(ValidationError, match="no_repeat_ngram_size"):
        BeamSearchParams(beam_width=1, max_tokens=4, no_repeat_ngram_size=-1)
