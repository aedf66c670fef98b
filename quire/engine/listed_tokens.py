"""What request fields say in words, as token ids: bad words, and the markers of reasoning."""

from __future__ import annotations

from collections.abc import Iterable

from quire.config import EngineConfig
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError, ValidationError
from quire.sampling_extras import ThinkingMarkers, checked_bad_words_token_ids
from quire.sampling_params import SamplingParams

THINK = ("<think>", "</think>")


def bad_words_token_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token sequences that a request forbids: its own, and each word with and without a leading space.

    Raises:
        ValidationError: there is no tokenizer, a word has no token, or they make too many sequences.
    """
    if tokenizer is None:
        raise ValidationError("bad_words need a tokenizer; use bad_words_token_ids", param="bad_words")
    sequences = list(params.bad_words_token_ids)
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ValidationError(f"bad_words: {word!r:.100} has no token", param="bad_words")
            sequences.append(ids)
    return checked_bad_words_token_ids(sequences)


def find_thinking_markers(
    config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int
) -> ThinkingMarkers | None:
    """What opens and closes a section of reasoning, as the options say or as most models have it; None: unknown.

    Raises:
        ConfigError: an option is given without the other, or makes too many tokens.
    """
    start, end = config.model.reasoning_start_str, config.model.reasoning_end_str
    if tokenizer is None or bool(start) != bool(end):
        if start or end:
            raise ConfigError(
                "--reasoning-start-str and --reasoning-end-str need each other, and a tokenizer"
            )
        return None
    texts = (start, end) if start else THINK
    start_ids, end_ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    if not start and (len(start_ids), len(end_ids)) != (1, 1):
        return None
    if max((*start_ids, *end_ids), default=0) >= vocab_size:
        return None
    try:
        return ThinkingMarkers(start_ids, end_ids)
    except ValidationError as error:
        raise ConfigError(f"--reasoning-start-str and --reasoning-end-str: {error.message}") from None


def indexed_ids(params: SamplingParams) -> dict[str, Iterable[int]]:
    """All token ids by which logits will be indexed, by the field that has them."""
    markers = params.thinking_markers
    return {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": [token_id for word in params.bad_words_token_ids for token_id in word],
        "thinking_markers": () if markers is None else (*markers.start_ids, *markers.end_ids),
    }
