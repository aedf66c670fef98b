"""`BeamSearchParams`: how a beam search is done."""

from __future__ import annotations

import math

import msgspec

from quire.errors import ValidationError

MAX_BEAM_WIDTH = 64
MAX_BEAM_LOGPROBS = 1024


class BeamSearchParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A search for the sequences of the highest score: the sum of their logprobs / length ** `length_penalty`.

    Names and defaults are vLLM's; what ends the search, and that the length is of the generated tokens alone, is as in
    Transformers' `generate(num_beams=...)`.

    Args:
        beam_width: sequences that are followed, and returned, 1..64.
        max_tokens: number of tokens to generate at most; no more than the context has room for.
        ignore_eos: an end-of-sequence token is a token like any other.
        temperature: only 0, since nothing is drawn.
        length_penalty: above 0 long sequences gain, below 0 short ones; [-10, 10].
        include_stop_str_in_output: keep the text of the end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_token_ids: those that stay in it all the same.
        early_stopping: True ends the search as soon as `beam_width` sequences have ended; False when the best open one,
            as it is, scores below all of these; "never" when no open one can get to score above.
        logprobs: number of most likely tokens reported per position, if there are to be more than the search needs.

    Raises:
        ValidationError: a value is of the wrong type or out of range; `param` names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    early_stopping: bool | str = False
    logprobs: int = 0
    shown_special_token_ids: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """Sequences that are returned."""
        return self.beam_width

    def __post_init__(self) -> None:
        for name, low, high in (
            ("beam_width", 1, MAX_BEAM_WIDTH),
            ("max_tokens", 1, 2**63 - 1),
            ("logprobs", 0, MAX_BEAM_LOGPROBS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValidationError(
                    f"{name} must be an integer in [{low}, {high}], got {value!r}", param=name
                )
        if self.temperature != 0.0:
            raise ValidationError(
                f"temperature must be 0 in a beam search, which draws nothing, got {self.temperature!r}",
                param="temperature",
            )
        penalty = self.length_penalty
        is_number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not is_number or not math.isfinite(penalty) or abs(penalty) > 10.0:
            raise ValidationError(
                f"length_penalty must be a number in [-10, 10], got {penalty!r}", param="length_penalty"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValidationError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r}',
                param="early_stopping",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(
                    f"{name} must be true or false, got {getattr(self, name)!r}", param=name
                )
