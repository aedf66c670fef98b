# SPDX-License-Identifier: Apache-2.0
"""Prompts of Florence-2: tasks in words, and places that stay in the text of answers.

Invariant: torch-free. The tokenizer holds places (<loc_0>) for special tokens, which other models' texts leave out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import Tokenizer
from quire.multimodal.processors.florence_tasks import ENDS, read_question
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.seq2seq.prompts import EncoderPrompts, PromptOptions


class FlorencePrompts(EncoderPrompts):
    """Prompts of one Florence-2 model; those with an image come tokenized, their tasks in words already."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        super().__init__(config, tokenizer)
        self._shown: tuple[int, ...] = ()
        if tokenizer is not None:
            ids = map(tokenizer.id_of, tokenizer.special_tokens.difference(ENDS))
            self._shown = tuple(sorted(token_id for token_id in ids if token_id is not None))

    def split(self, prompt: Any) -> tuple[Any, PromptOptions]:
        """See `EncoderPrompts.split`. Raises also ValidationError: a task does not go with the text beside it."""
        rest, options = super().split(prompt)
        if isinstance(rest, str):
            rest = _in_words(rest)
        elif isinstance(rest, dict) and isinstance(rest.get("prompt"), str):
            rest = {**rest, "prompt": _in_words(rest["prompt"])}
        return rest, options

    def sampled(self, params: SamplingParams) -> SamplingParams:
        """See `EncoderPrompts.sampled`; places are kept in the text."""
        params = super().sampled(params)
        shown = tuple(dict.fromkeys((*params.shown_special_token_ids, *self._shown)))
        return params.replace_unchecked(shown_special_token_ids=shown)

    def searched(self, prompt: TokenizedPrompt, params: BeamSearchParams) -> BeamSearchParams:
        """See `EncoderPrompts.searched`."""
        return self.shown(super().searched(prompt, params))

    def shown(self, params: BeamSearchParams) -> BeamSearchParams:
        """See `EncoderPrompts.shown`."""
        shown = tuple(dict.fromkeys((*params.shown_special_token_ids, *self._shown)))
        return msgspec.structs.replace(params, shown_special_token_ids=shown)


def _in_words(text: str) -> str:
    question = read_question(text)
    return text if question is None else question.text
