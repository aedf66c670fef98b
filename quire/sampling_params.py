# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters and beam search parameters of one request.

Invariant: an instance is valid by itself and frozen; model-dependent checks (vocabulary, context length) are made by
the input processor. They are msgspec structs, so they cross process borders as is.
"""

from __future__ import annotations

import copy
import enum
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import ValidationError
from quire.sampling_extras import (
    MAX_LOGPROB_TOKEN_IDS,
    DryBreaker,
    RepetitionDetectionParams,
    ThinkingMarkers,
    check_bad_words,
    check_dry_sequence_breakers,
    check_extra_args,
    checked_bad_words_token_ids,
    checked_repetition_detection,
)
from quire.structured_outputs_params import StructuredOutputsParams, checked_structured_outputs
from quire.vllm_names.imports import attributes_of
from quire.vllm_names.parameters import KeywordCheck

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "ThinkingMarkers",
]

logger = logging.getLogger(__name__)

MAX_BEAM_WIDTH = 64
MAX_BEAM_LOGPROBS = 1024
MAX_NGRAM_SIZE = 64


class BeamSearchParams(msgspec.Struct, metaclass=KeywordCheck, frozen=True, forbid_unknown_fields=True):
    """Beam search for the sequences of the highest score: the sum of their logprobs / length ** `length_penalty`.

    Names and defaults are vLLM's; the stopping rule, and the length (of generated tokens alone), are those of
    Transformers' `generate(num_beams=...)`.

    Args:
        beam_width: number of beams, and of returned sequences, 1..64.
        max_tokens: most tokens to generate; capped by the context.
        ignore_eos: an end-of-sequence token is a token like any other.
        temperature: only 0, since nothing is sampled.
        length_penalty: above 0 long sequences gain, below 0 short ones; [-10, 10].
        include_stop_str_in_output: keep the text of the end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        shown_special_token_ids: special tokens that are kept all the same.
        early_stopping: True ends the search as soon as `beam_width` sequences have ended; False when the best open
            one, as it is, scores below all of these; "never" when no open one can reach a higher score.
        logprobs: number of most likely tokens reported per position, if more than the search needs.
        min_tokens: no sequence ends before so many tokens.
        no_repeat_ngram_size: no n-gram of so many tokens occurs twice in a sequence; 0: any may.
        forced_last_token_id, banned_token_ids, decoder_token_ids, num_forced_tokens: of an encoder-decoder model, set
            by the engine: the token that ends a sequence of `max_tokens`, tokens that are never chosen, the decoder's
            prompt, and how many of its tokens count as generated.
        extra_args: of the requests for each token, for logits processors.

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
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0
    forced_last_token_id: int | None = None
    banned_token_ids: tuple[int, ...] = ()
    decoder_token_ids: tuple[int, ...] = ()
    num_forced_tokens: int = 0
    extra_args: dict[str, Any] | None = None

    @property
    def n(self) -> int:
        """Number of returned sequences."""
        return self.beam_width

    def __post_init__(self) -> None:
        for name, low, high in (
            ("beam_width", 1, MAX_BEAM_WIDTH),
            ("max_tokens", 1, 2**63 - 1),
            ("logprobs", 0, MAX_BEAM_LOGPROBS),
            ("min_tokens", 0, self.max_tokens if type(self.max_tokens) is int else 0),
            ("no_repeat_ngram_size", 0, MAX_NGRAM_SIZE),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValidationError(
                    f"{name} must be an integer in [{low}, {high}], got {value!r}", param=name
                )
        if self.temperature != 0.0:
            raise ValidationError(
                f"temperature must be 0 in a beam search, which does not sample, got {self.temperature!r}",
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


GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 0.01
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # Of all stop strings together: each is searched for after every token.
INT64_MAX = 2**63 - 1


class RequestOutputKind(enum.IntEnum):
    """Content of each `RequestOutput` of a request."""

    CUMULATIVE = 0  # All text so far, at every step.
    DELTA = 1  # Only what is new since the last output.
    FINAL_ONLY = 2  # One output, at the end.


class SamplingParams(
    msgspec.Struct, metaclass=KeywordCheck, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """Sampling parameters of one request; names, order and defaults are vLLM's. `clone` makes a modified copy.

    Args:
        n: completions per prompt, 1..128.
        presence_penalty: subtracted once from the logit of every token already generated, [-2, 2].
        frequency_penalty: subtracted per occurrence in the generated text, [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, > 0.
        temperature: divides the logits, [0, 2]; 0 is greedy.
        top_p: smallest set of tokens with this probability mass is kept, (0, 1].
        top_k: number of most likely tokens kept; 0 or -1 keeps all.
        min_p: tokens less likely than this fraction of the most likely one are dropped, [0, 1].
        seed: makes sampling reproducible; None or -1 lets the engine choose.
        stop: strings that end generation, at most 64 of 4,096 characters in all; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end generation.
        ignore_eos: continue after the end-of-sequence token.
        max_tokens: most tokens to generate; None fills the context.
        min_tokens: no end-of-sequence or stop token before this many tokens.
        logprobs: number of most likely tokens reported per position (plus the sampled one); -1 is all.
        prompt_logprobs: the same for the prompt's positions.
        logprob_token_ids: report the logprobs of these tokens in place of the most likely ones, at most 128;
            `logprobs`, if given, must be their number.
        flat_logprobs: return logprobs as `FlatLogprobs`, which are cheaper in large numbers than a dict per position.
        detokenize: produce text; without it only token ids are returned.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: only True, which is how the tokenizers here decode.
        shown_special_token_ids: special tokens that are kept all the same, such as the markers of tool calls.
        include_stop_str_in_output: keep the stop string in the text.
        output_kind: cumulative, delta or final-only outputs.
        stream_interval: tokens collected per output, after the first.
        logit_bias: added to the logits of these token ids, each in [-100, 100].
        allowed_token_ids: only these tokens may be generated.
        extra_args: plain data for custom logits processors.
        bad_words: words that are not generated, with or without a leading space; at most 128 token sequences.
        skip_reading_prefix_cache: compute the whole prompt; implied by `prompt_logprobs`.
        thinking_token_budget: most tokens of a reasoning section before its end is forced; None or -1: unlimited.
        repetition_detection: end a text that repeats itself, with finish_reason "repetition".
        bad_words_token_ids: `bad_words` as token ids, to which the engine adds those of the words.
        thinking_markers: tokens that open and close the reasoning; None: the model's.
        logits_processors: callables (prompt_ids, output_ids, logits [V]) -> logits or None (changed in place), for an
            engine whose core is in the caller's process.
        structured_outputs: constraint on the text: a schema, an expression or a grammar.
        repeat_last_n: tokens at the end of the context that the penalties count; -1 is the whole context, 0 none.
        dry_multiplier: DRY: a token that would extend a repetition of length L is lowered by
            `dry_multiplier * dry_base ** (L - dry_allowed_length)`, [0, 100]; 0 is off.
        dry_base: growth of that penalty, [0, 100]; below 1 is off.
        dry_allowed_length: repetitions shorter than this are free, >= 0.
        dry_penalty_last_n: tokens at the end of the context that are searched; -1 is the whole context, 0 is off.
        dry_sequence_breakers: texts that no repetition spans, at most 64 of 40 characters; None is newline, colon,
            quote and asterisk.
        top_n_sigma: keep tokens within so many standard deviations of the highest logit, [-1, 100]; 0 and -1 are off.
        typical_p: keep the most typical tokens that hold this probability mass, (0, 1]; 1 is off.
        xtc_probability: probability per token that XTC applies, [0, 1].
        xtc_threshold: XTC drops all tokens of at least this probability but the least likely of them, [0, 1]; above
            0.5 is off.
        dynatemp_range: the temperature lies within `temperature` +- this by the entropy of the candidates, [0, 10].
        dynatemp_exponent: exponent of the normalized entropy for that range, [0, 100].
        mirostat: 1 or 2 keeps the surprise of the text near `mirostat_tau`, in place of all other filters; 0 is off.
        mirostat_tau: target surprise in bits, [0, 100].
        mirostat_eta: learning rate, [0, 10].
        temperature_last: filter candidates in llama.cpp's order, which ends with the temperature, even without a
            filter specific to llama.cpp.
        dry_breakers: `dry_sequence_breakers` as token ids, set by the engine.

    Raises:
        ValidationError: a value is of the wrong type or out of range; `param` names it.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: Sequence[str] = ()
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    thinking_markers: ThinkingMarkers | None = None
    logits_processors: Any = ()
    shown_special_token_ids: Sequence[int] = ()
    structured_outputs: StructuredOutputsParams | None = None
    repeat_last_n: int = -1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] | None = None
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    temperature_last: bool = False
    dry_breakers: tuple[DryBreaker, ...] = ()

    def __post_init__(self) -> None:
        self._normalize()
        for name, low, high in _FLOAT_RANGES:
            self._set(name, _checked_float(name, getattr(self, name), low, high))
        for name, low_int, high_int in _INT_RANGES:
            _check_int(name, getattr(self, name), low_int, high_int)
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(
                    f"{name} must be true or false, got {getattr(self, name)!r}", param=name
                )
        self._check_lists()
        self._check_extras()
        self._check_relations()
        self._normalize_temperature()

    def _set(self, name: str, value: Any) -> None:
        """Set a field during construction, to its canonical form."""
        msgspec.structs.force_setattr(self, name, value)

    def _normalize(self) -> None:
        self._set("stop", _as_tuple("stop", self.stop, str))
        self._set(
            "stop_token_ids", tuple(dict.fromkeys(_as_tuple("stop_token_ids", self.stop_token_ids, int)))
        )
        self._set(
            "shown_special_token_ids", _as_tuple("shown_special_token_ids", self.shown_special_token_ids, int)
        )
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.thinking_token_budget == -1:
            self._set("thinking_token_budget", None)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                self._set(name, 1 if getattr(self, name) else None)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValidationError(
                f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}", param="stop"
            )
        if any(not text for text in self.stop):
            raise ValidationError("stop must not contain an empty string", param="stop")
        num_chars = sum(map(len, self.stop))
        if num_chars > MAX_STOP_CHARS:
            raise ValidationError(
                f"stop has {num_chars} characters in all, the limit is {MAX_STOP_CHARS}", param="stop"
            )
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids, int))
            if not self.allowed_token_ids:
                raise ValidationError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_logit_bias(self.logit_bias))
        self._set("structured_outputs", checked_structured_outputs(self.structured_outputs))
        if self.dry_sequence_breakers is not None:
            breakers = _as_tuple("dry_sequence_breakers", self.dry_sequence_breakers, str)
            self._set("dry_sequence_breakers", breakers)
            check_dry_sequence_breakers(breakers)

    def _check_extras(self) -> None:
        self._set("bad_words", _as_tuple("bad_words", self.bad_words, str))
        check_bad_words(self.bad_words)
        self._set("bad_words_token_ids", checked_bad_words_token_ids(self.bad_words_token_ids))
        self._set("repetition_detection", checked_repetition_detection(self.repetition_detection))
        if self.extra_args is not None:
            check_extra_args(self.extra_args)
        if self.logprob_token_ids is not None:
            ids = dict.fromkeys(_as_tuple("logprob_token_ids", self.logprob_token_ids, int))
            self._set("logprob_token_ids", tuple(ids))
        self._set("logits_processors", tuple(self.logits_processors or ()))
        if not all(map(callable, self.logits_processors)):
            raise ValidationError("logits_processors must be callables", param="logits_processors")
        if self.skip_reading_prefix_cache not in (None, True, False):
            raise ValidationError(
                "skip_reading_prefix_cache must be true or false", param="skip_reading_prefix_cache"
            )

    def _check_relations(self) -> None:
        listed = self.logprob_token_ids
        if listed is not None and not 1 <= len(listed) <= MAX_LOGPROB_TOKEN_IDS:
            raise ValidationError(
                f"logprob_token_ids has {len(listed)} ids, the limits are 1 and {MAX_LOGPROB_TOKEN_IDS}",
                param="logprob_token_ids",
            )
        if listed is not None and self.logprobs not in (None, len(listed)):
            raise ValidationError(
                f"logprobs is {self.logprobs}, and logprob_token_ids has {len(listed)} ids: leave logprobs out",
                param="logprobs",
            )
        if not self.spaces_between_special_tokens:
            raise ValidationError(
                "spaces_between_special_tokens must be true: the tokenizers here decode in one way",
                param="spaces_between_special_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise ValidationError("stop strings need detokenize=True", param="stop")

    def _normalize_temperature(self) -> None:
        if self.temperature < GREEDY_EPSILON:
            self._set("temperature", 0.0)
            self._set("mirostat", 0)  # a single candidate leaves nothing to sample
            for name, value in () if self.has_sampler_chain else _GREEDY:
                self._set(name, value)
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is below %g and was raised to it", self.temperature, MIN_TEMPERATURE
            )
            self._set("temperature", MIN_TEMPERATURE)

    @property
    def greedy(self) -> bool:
        """True if the most likely remaining token is always taken."""
        return self.temperature == 0.0 and self.dynatemp_range == 0.0

    @property
    def uses_xtc(self) -> bool:
        """True if XTC can have an effect."""
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5

    @property
    def needs_seed(self) -> bool:
        """True if anything is sampled at random."""
        return not self.greedy or self.uses_xtc

    @property
    def has_sampler_state(self) -> bool:
        """True if sampling depends on earlier logits, which a resumed request must compute again."""
        return self.mirostat > 0

    @property
    def uses_dry(self) -> bool:
        """True if DRY can have an effect."""
        return self.dry_multiplier > 0.0 and self.dry_base >= 1.0 and self.dry_penalty_last_n != 0

    @property
    def has_sampler_chain(self) -> bool:
        """True if candidates are filtered in llama.cpp's order, because one of its own filters is on."""
        return (
            self.top_n_sigma > 0.0
            or self.typical_p < 1.0
            or self.uses_xtc
            or self.dynatemp_range > 0.0
            or self.mirostat > 0
            or self.temperature_last
        )

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a validated copy with some fields replaced."""
        return msgspec.structs.replace(self, **changes)

    def replace_unchecked(self, **values: Any) -> SamplingParams:
        """Return a copy with values known to be valid: nothing is validated again, and lists are shared."""
        copied = copy.copy(self)
        for name, value in values.items():
            copied._set(name, value)
        return copied

    @property
    def wants_logprobs(self) -> bool:
        """True if logprobs of generated tokens are reported."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def num_listed_ids(self) -> int:
        """Number of individually listed token ids, of which every sequence keeps a table."""
        return len(self.stop_token_ids) + len(self.allowed_token_ids or ()) + len(self.logit_bias or ())

    @staticmethod
    def from_optional(**values: Any) -> SamplingParams:
        """Build parameters with the default for each value that is None."""
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})


_GREEDY = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))
_BOOLS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "flat_logprobs",
    "spaces_between_special_tokens", "temperature_last",
)  # fmt: skip
_FLOAT_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", math.nextafter(0.0, 1.0), math.inf),
    ("temperature", 0.0, 2.0),
    ("top_p", math.nextafter(0.0, 1.0), 1.0),
    ("min_p", 0.0, 1.0),
    ("dry_multiplier", 0.0, 100.0),
    ("dry_base", 0.0, 100.0),
    ("top_n_sigma", -1.0, 100.0),
    ("typical_p", math.nextafter(0.0, 1.0), 1.0),
    ("xtc_probability", 0.0, 1.0),
    ("xtc_threshold", 0.0, 1.0),
    ("dynatemp_range", 0.0, 10.0),
    ("dynatemp_exponent", 0.0, 100.0),
    ("mirostat_tau", 0.0, 100.0),
    ("mirostat_eta", 0.0, 10.0),
)
_INT_RANGES = (
    ("n", 1, MAX_N),
    ("top_k", 0, INT64_MAX),
    ("seed", -INT64_MAX - 1, INT64_MAX),
    ("max_tokens", 1, INT64_MAX),
    ("min_tokens", 0, INT64_MAX),
    ("logprobs", -1, INT64_MAX),
    ("prompt_logprobs", -1, INT64_MAX),
    ("stream_interval", 1, INT64_MAX),
    ("thinking_token_budget", 0, INT64_MAX),
    ("repeat_last_n", -1, INT64_MAX),
    ("dry_allowed_length", 0, INT64_MAX),
    ("dry_penalty_last_n", -1, INT64_MAX),
    ("mirostat", 0, 2),
)
INT_FIELDS = frozenset(name for name, _, _ in _INT_RANGES)
_OPTIONAL_INTS = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "stream_interval", "thinking_token_budget"}
)
RANGES: dict[str, tuple[float, float]] = {
    name: (low, high) for name, low, high in (*_FLOAT_RANGES, *_INT_RANGES)
}  # Field -> (least, greatest) value, for schemas.


def _checked_float(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValidationError(f"{name} must be a number, got {value!r}", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        lower = "(0" if 0.0 < low < 1e-300 else f"[{low:g}"
        upper = "inf)" if math.isinf(high) else f"{high:g}]"
        raise ValidationError(f"{name} must be finite and in {lower}, {upper}, got {value!r}", param=name)
    return float(value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in _OPTIONAL_INTS:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        limit = f"at least {low}" if high == INT64_MAX and value < low else f"in [{low}, {high}]"
        raise ValidationError(f"{name} must be {limit}, got {value}", param=name)


def _as_tuple(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, kind) and not isinstance(value, bool):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValidationError(f"{name} must be a list, got {value!r}", param=name)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, kind):
            raise ValidationError(
                f"{name} must contain only {kind.__name__} values, got {item!r}", param=name
            )
    return tuple(value)


def _checked_logit_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise ValidationError(f"logit_bias must map token ids to numbers, got {bias!r}", param="logit_bias")
    checked: dict[int, float] = {}
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValidationError(f"logit_bias keys must be token ids, got {token_id!r}", param="logit_bias")
        checked[token_id] = _checked_float("logit_bias", value, -100.0, 100.0)
    return checked


def _refuse_assignment(params: SamplingParams, name: str, value: object) -> None:
    raise AttributeError(f"SamplingParams are immutable; clone({name}={value!r}) returns a changed copy")


# After the class was made: msgspec replaces the method of a frozen class.
SamplingParams.__setattr__ = _refuse_assignment  # type: ignore[assignment]


if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
