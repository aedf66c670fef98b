# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding (see speculative.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError

Length = Annotated[int, msgspec.Meta(ge=1, le=64)]
DEFAULT_NUM_DRAFTS = 8
DRAFT_MODEL = "draft_model"
MEDUSA = "medusa"
EAGLE, EAGLE3 = "eagle", "eagle3"
MTP = "mtp"
AHEAD_IN_CACHE = (DRAFT_MODEL, EAGLE, EAGLE3, MTP)  # Methods whose drafts take KV cache slots.
SHORTEST_MATCH, LONGEST_MATCH = 2, 8


class SpeculativeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `--speculative-config`, named as vLLM's where it has them.

    Args:
        method: "auto" (ngram and suffix), or a drafter's name; None: no drafts.
        num_speculative_tokens: most draft tokens per request and step; None: 8.
        adaptive: choose the number of drafts by acceptance and step costs; false: always the most.
        prompt_lookup_min: fewest tokens of an earlier match, for ngram; None: 2.
        prompt_lookup_max: most tokens that are compared; None: 8.
        suffix_decoding_max_cached_tokens: tokens of recent outputs kept for suffix.
        model: file of recorded outputs, for recorded; for other methods, the draft model or head.
        quantization: precision of the draft model's weights, as --quantization; None: the checkpoint's.
        synthetic_acceptance_rate: fraction of drafts that are made right on purpose, for recorded.
    """

    method: str | None = None
    num_speculative_tokens: Length | None = None
    adaptive: bool = True
    prompt_lookup_min: Length | None = None
    prompt_lookup_max: Length | None = None
    suffix_decoding_max_cached_tokens: Annotated[int, msgspec.Meta(ge=1024)] = 2**16
    model: str | None = None
    quantization: str | None = None
    synthetic_acceptance_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0

    @property
    def most_drafts(self) -> int:
        """Most draft tokens per request and step."""
        return self.num_speculative_tokens or DEFAULT_NUM_DRAFTS

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens after those of a step that need cache slots because the draft model runs before the next step."""
        return self.most_drafts if self.method in AHEAD_IN_CACHE else 0

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that ngram compares; if only one is given, the other is adjusted."""
        shortest = self.prompt_lookup_min or min(SHORTEST_MATCH, self.prompt_lookup_max or SHORTEST_MATCH)
        return shortest, self.prompt_lookup_max or max(LONGEST_MATCH, shortest)


COMMON_KEYS = frozenset({"method", "num_speculative_tokens", "adaptive"})  # Keys of every method.


@dataclass(frozen=True)
class SpeculativeConfig(Config):
    """Speculative decoding: drafts verified several per step, with unchanged results (see speculative.md)."""

    speculative_config: dict[str, Any] = option(
        {}, 'JSON object such as {"method": "auto"}; all keys are in speculative.md. Default: no drafts.'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = _parse(self.speculative_config)
        if self.speculative_config and settings.method is None:
            raise ConfigError('--speculative-config needs a "method", such as "auto"')
        shortest, longest = settings.prompt_lookup
        if shortest > longest:
            raise ConfigError(
                f"--speculative-config: prompt_lookup_min is {shortest}, above prompt_lookup_max, {longest}"
            )

    @property
    def settings(self) -> SpeculativeSettings:
        """Parsed keys with their types and defaults."""
        return _parse(self.speculative_config)


def _parse(value: dict[str, Any]) -> SpeculativeSettings:
    try:
        return msgspec.convert(value, SpeculativeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--speculative-config: {error}") from None
