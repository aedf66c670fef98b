# SPDX-License-Identifier: Apache-2.0
"""Generation settings of an encoder-decoder checkpoint: how its decoder begins and ends, and its beam search.

Invariant: torch-free. Keys are those of transformers; generation_config.json goes before config.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import ModelLoadError, ValidationError
from quire.models.generation_config import GENERATION
from quire.models.json_object import optional_json_object
from quire.sampling_params import MAX_BEAM_WIDTH, MAX_NGRAM_SIZE, BeamSearchParams

DEFAULT_LENGTH = 20
"""Tokens of a decoder, its prompt included, if a checkpoint does not say: the default of transformers."""


@dataclass(frozen=True)
class DecoderSettings:
    """Settings of a checkpoint's decoder.

    Args:
        start: first token of every decoder prompt.
        forced_first: token that follows it in place of a generated one; None: none does.
        forced_last: token that ends a sequence of the greatest length in a beam search; None: any token may.
        banned: tokens that are never generated.
        search: parameters of the checkpoint's own beam search; its lengths count the decoder's prompt.
    """

    start: int
    forced_first: int | None
    forced_last: int | None
    banned: tuple[int, ...]
    search: BeamSearchParams


class _Keys:
    """Values of JSON objects, of which the first that has a key counts."""

    def __init__(self, where: str, *objects: dict[str, Any]) -> None:
        self.where = where
        self._objects = objects

    def get(self, key: str) -> Any:
        """Return the unchecked value; None: there is none."""
        return next((one[key] for one in self._objects if one.get(key) is not None), None)

    def integer(self, key: str, least: int, most: int) -> int | None:
        """Return an integer in [least, most].

        Raises:
            ModelLoadError: it is something else.
        """
        value = self.get(key)
        if value is None or (type(value) is int and least <= value <= most):
            return value
        raise ModelLoadError(
            f"{self.where}: {key} must be an integer in [{least}, {most}], got {value!r:.100}"
        )

    def token(self, key: str, vocab_size: int) -> int | None:
        """Return a token id; of a list the first. Raises as `integer`."""
        value = self.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if value is None or (type(value) is int and 0 <= value < vocab_size):
            return value
        raise ModelLoadError(
            f"{self.where}: {key} must be a token id in [0, {vocab_size - 1}], got {value!r:.100}"
        )


def whole_config(config: EngineConfig) -> dict[str, Any]:
    """Return config.json of the whole model."""
    part_of = config.arch.part_of
    assert part_of is not None, "a decoder belongs to an encoder"
    values: dict[str, Any] = json.loads(part_of.config)
    return values


def read_settings(config: EngineConfig) -> DecoderSettings:
    """Return the settings of the checkpoint of a resolved configuration.

    Raises:
        ModelLoadError: a value is malformed, or no token begins the decoder's prompt.
    """
    arch = config.arch
    generation = optional_json_object(Path(config.model_dir) / GENERATION)
    whole = whole_config(config)
    inside = whole.get("decoder", whole.get("text_config"))
    keys = _Keys(config.model_dir, generation.values, whole, inside if isinstance(inside, dict) else {})
    start = keys.token("decoder_start_token_id", arch.vocab_size)
    if start is None:
        start = keys.token("bos_token_id", arch.vocab_size)
    if start is None:
        raise ModelLoadError(
            f"{config.model_dir}: decoder_start_token_id is missing in generation_config.json and config.json; it "
            "must be the token id with which the decoder begins"
        )
    forced_last = keys.token("forced_eos_token_id", arch.vocab_size)
    return DecoderSettings(
        start,
        keys.token("forced_bos_token_id", arch.vocab_size),
        forced_last,
        _banned(keys, arch.vocab_size),
        _search(keys, config.model.max_model_len),
    )


def _banned(keys: _Keys, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of `bad_words_ids` with one token each, and those that are suppressed."""
    words = keys.get("bad_words_ids") or []
    suppressed = keys.get("suppress_tokens") or []
    is_list = isinstance(words, list) and isinstance(suppressed, list)
    ids = [word for each in words if isinstance(each, list) for word in each] if is_list else None
    if ids is None or not all(type(one) is int and 0 <= one < vocab_size for one in (*ids, *suppressed)):
        raise ModelLoadError(f"{keys.where}: bad_words_ids and suppress_tokens must be lists of token ids")
    alone = [each[0] for each in words if len(each) == 1]
    return tuple(dict.fromkeys((*alone, *suppressed)))


def _search(keys: _Keys, context: int) -> BeamSearchParams:
    """Return the parameters of the checkpoint's own beam search, with lengths that count the decoder's prompt."""
    new = keys.integer("max_new_tokens", 1, 2**31)
    length = new + 1 if new is not None else keys.integer("max_length", 1, 2**31) or DEFAULT_LENGTH
    penalty = keys.get("length_penalty")
    early = keys.get("early_stopping")
    try:
        return BeamSearchParams(
            beam_width=keys.integer("num_beams", 1, MAX_BEAM_WIDTH) or 1,
            max_tokens=min(length, context),
            length_penalty=1.0 if penalty is None else penalty,
            early_stopping=False if early is None else early,
            min_tokens=min(keys.integer("min_length", 0, 2**31) or 0, length, context),
            no_repeat_ngram_size=keys.integer("no_repeat_ngram_size", 0, MAX_NGRAM_SIZE) or 0,
        )
    except ValidationError as error:
        raise ModelLoadError(f"{keys.where}: generation config: {error.message}") from None
