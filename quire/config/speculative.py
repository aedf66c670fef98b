"""Whether and how tokens are guessed ahead (see speculative.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError

Length = Annotated[int, msgspec.Meta(ge=1, le=64)]
MOST_DRAFTS = 8
DRAFT_MODEL = "draft_model"
MEDUSA = "medusa"
EAGLE, EAGLE3 = "eagle", "eagle3"
MTP = "mtp"
AHEAD_IN_CACHE = (DRAFT_MODEL, EAGLE, EAGLE3, MTP)
"""Methods whose guesses take slots of the KV cache."""
SHORTEST_MATCH, LONGEST_MATCH = 2, 8


class SpeculativeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `--speculative-config`, named as vLLM's where it has them.

    Args:
        method: who guesses: "auto" (ngram and suffix), or a drafter's name; None: nobody.
        num_speculative_tokens: most tokens that are guessed at a time for a request; None: 8.
        adaptive: guess as many as pay by what was accepted and what steps cost; false: always as many as can be had.
        prompt_lookup_min: fewest tokens that must stand earlier in the text too, for ngram; None: 2.
        prompt_lookup_max: most tokens that are compared; None: 8.
        suffix_decoding_max_cached_tokens: tokens of recent outputs that are kept for suffix.
        model: file of recorded outputs, for recorded; for others, the model or the heads that guess.
        quantization: precision of their weights, as --quantization; None: as the checkpoint has them.
        synthetic_acceptance_rate: share of guesses that are made right on purpose, for recorded.
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
        """Tokens that are guessed at a time for a request."""
        return self.num_speculative_tokens or MOST_DRAFTS

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens behind those of a step for which there should be cache, where a model guesses before the next step."""
        return self.most_drafts if self.method in AHEAD_IN_CACHE else 0

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Fewest and most tokens that ngram compares; one that is given alone draws the other along."""
        shortest = self.prompt_lookup_min or min(SHORTEST_MATCH, self.prompt_lookup_max or SHORTEST_MATCH)
        return shortest, self.prompt_lookup_max or max(LONGEST_MATCH, shortest)


COMMON_KEYS = frozenset({"method", "num_speculative_tokens", "adaptive"})
"""Those that every method understands."""


@dataclass(frozen=True)
class SpeculativeConfig(Config):
    """Speculative decoding: guessed tokens, verified several in a step, with the same results (see speculative.md)."""

    speculative_config: dict[str, Any] = option(
        {},
        'JSON object such as {"method": "auto"}; all keys are in speculative.md. Default: nothing is guessed.',
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
        """The keys with their types and defaults."""
        return _parse(self.speculative_config)


def _parse(value: dict[str, Any]) -> SpeculativeSettings:
    try:
        return msgspec.convert(value, SpeculativeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--speculative-config: {error}") from None
