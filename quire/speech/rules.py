# SPDX-License-Identifier: Apache-2.0
"""Whisper's rules of sampling, as a logits processor of the engine.

A request asks for them by `extra_args`: `{"speech": {"timestamps": true}}`. Invariant: nothing is kept between tokens,
so a request's tokens depend on the request alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.logits_processors import LogitsProcessor, RequestLogitsProcessor
from quire.models.checkpoint_files import has_file
from quire.sampling_params import SamplingParams
from quire.speech.vocabulary import SpeechVocabulary, read_vocabulary

if TYPE_CHECKING:
    from torch import Tensor

ARGUMENT, TIMESTAMPS, KEEPS_MASS = "speech", "timestamps", "keeps_mass"
PLACE = "quire.speech.rules:SpeechRules"
NEVER = -math.inf


def rule_args(*, timestamps: bool, keeps_mass: bool = False) -> dict[str, Any]:
    """Return the `extra_args` of a request under the rules; `keeps_mass` as in `RequestRules`."""
    return {ARGUMENT: {TIMESTAMPS: timestamps, KEEPS_MASS: keeps_mass}}


def sink_of(words: SpeechVocabulary, *, timestamps: bool) -> int:
    """Return a token that the rules always ban."""
    return words.no_timestamps if timestamps else words.first_timestamp


class SpeechRules(LogitsProcessor):
    """Suppressed tokens, and the order of timestamps, for requests that ask for them."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        file = _tokenizer_file(config)
        self._vocabulary = read_vocabulary(config, file)

    def for_request(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        asked = (params.extra_args or {}).get(ARGUMENT)
        if asked is None:
            return None
        keeps_mass = bool(asked.get(KEEPS_MASS, False))
        return RequestRules(self._vocabulary, timestamps=bool(asked[TIMESTAMPS]), keeps_mass=keeps_mass)


def _tokenizer_file(config: EngineConfig) -> Any:
    from quire.engine.file_states import tokenizer_dir

    file = tokenizer_dir(config) / "tokenizer.json"
    return file if has_file(file) else None


class RequestRules:
    """Rules of one request.

    With timestamps: a text lies between two of them, which never go back; the first is at most `max_initial`; and where
    all timestamps together are likelier than every text token, a timestamp is sampled.

    Args:
        keeps_mass: banned tokens' probability goes to one of them (`sink_of`), so that the logprobs of the others stay.
            A beam search adds these up, as transformers does, and passes over that token.
    """

    def __init__(self, vocabulary: SpeechVocabulary, *, timestamps: bool, keeps_mass: bool = False) -> None:
        self._words = vocabulary
        self._timestamps = timestamps
        self._sink = sink_of(vocabulary, timestamps=timestamps) if keeps_mass else None

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> None:
        """Change the logits [V] of the token after `output_ids`."""
        if self._sink is None:
            self._apply(output_ids, logits)
            return
        before = logits.logsumexp(dim=-1)
        self._apply(output_ids, logits)
        kept = (logits.logsumexp(dim=-1) - before).exp()
        logits[self._sink] = before + (1.0 - kept).clamp(min=0.0).log()

    def _apply(self, output_ids: list[int], logits: Tensor) -> None:
        words = self._words
        logits[list(words.suppressed)] = NEVER
        if not output_ids:
            logits[list(words.suppressed_first)] = NEVER
        if not self._timestamps:
            logits[words.first_timestamp :] = NEVER
            return
        logits[words.no_timestamps] = NEVER
        first = words.first_timestamp
        if output_ids:
            self._keep_pairs(output_ids, logits)
        else:
            logits[:first] = NEVER
            logits[first + words.max_initial + 1 :] = NEVER
        scores = logits.log_softmax(dim=-1)
        if scores[first:].logsumexp(dim=-1) > scores[:first].max():
            logits[:first] = NEVER

    def _keep_pairs(self, output_ids: list[int], logits: Tensor) -> None:
        first = self._words.first_timestamp
        is_open = output_ids[-1] >= first
        follows_pair = is_open and (len(output_ids) < 2 or output_ids[-2] >= first)
        if follows_pair:
            logits[first:] = NEVER
        elif is_open:
            logits[: self._words.end] = NEVER
        last = next((token for token in reversed(output_ids) if token >= first), None)
        if last is not None:
            logits[first : last + (not is_open or follows_pair)] = NEVER
