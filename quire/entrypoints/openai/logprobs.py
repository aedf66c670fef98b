# SPDX-License-Identifier: Apache-2.0
"""Logprobs of replies. They are at least `FLOOR`, since JSON has no minus infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.entrypoints.openai.protocol.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptPosition,
    TokenLogprob,
    TopLogprob,
)
from quire.outputs import Logprob, PositionLogprobs

FLOOR = -9999.0

# Alternatives reported per position: so many of the most likely (-1: all), or these token ids.
Top = int | Sequence[int]

# (token id, its text if there is a tokenizer) -> its representation in the reply.
Naming = Callable[[int, str | None], str]


def naming_of(*, as_ids: bool | None) -> Naming:
    """Return the function that formats tokens: as text, or as ids (`return_tokens_as_token_ids`)."""
    return (lambda token_id, _: id_text(token_id)) if as_ids else text_or_id


def chat_logprobs(positions: Sequence[PositionLogprobs], top: Top, naming: Naming) -> ChatLogprobs:
    """Return one entry per generated token, each with its alternatives."""
    return ChatLogprobs(content=[_chat_entry(position, top, naming) for position in positions])


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    top: Top,
    offset: int,
    text_of: Callable[[int], str],
    naming: Naming,
) -> tuple[CompletionLogprobs, int]:
    """Return parallel lists over tokens, and the text offset of the next token.

    Args:
        positions: one per token; None for the first token of an echoed prompt, which has no logprob.
        top: alternatives to report at each position.
        offset: text offset of the first token within the choice.
        text_of: returns the text of a token that has no logprob.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = position[token_id] if position else None
        text = text_or_id(token_id, chosen.decoded_token) if chosen else text_of(token_id)
        result.tokens.append(naming(token_id, text))
        result.text_offset.append(offset)
        result.token_logprobs.append(None if chosen is None else floored(chosen.logprob))
        result.top_logprobs.append(None if position is None else _top_by_text(position, top, naming))
        token_bytes = chosen.token_bytes if chosen else None
        offset += _num_begun(text.encode() if token_bytes is None else token_bytes)
    return result, offset


def prompt_logprobs_json(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[PromptPosition | None] | None:
    """Return the prompt's logprobs in vLLM's form: one map from token id per position, null for the first."""
    if positions is None:
        return None
    return [None if position is None else _by_id(position) for position in positions]


def floored(logprob: float) -> float:
    return max(logprob, FLOOR)


def text_or_id(token_id: int, text: str | None) -> str:
    """Return a token's text, or its id without a tokenizer."""
    return id_text(token_id) if text is None else text


def id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _chat_entry(position: PositionLogprobs, top: Top, naming: Naming) -> TokenLogprob:
    token_id, chosen = next(iter(position.items()))
    others = [_top_entry(token_id, logprob, naming) for token_id, logprob in _beside(position, top)]
    name = naming(token_id, chosen.decoded_token)
    return TokenLogprob(name, floored(chosen.logprob), _byte_values(chosen), others)


def _top_entry(token_id: int, logprob: Logprob, naming: Naming) -> TopLogprob:
    name = naming(token_id, logprob.decoded_token)
    return TopLogprob(name, floored(logprob.logprob), _byte_values(logprob))


def _num_begun(token_bytes: bytes) -> int:
    """Count the characters that begin in a token, so that a split one counts once."""
    return sum(byte & 0xC0 != 0x80 for byte in token_bytes)


def _byte_values(logprob: Logprob) -> list[int] | None:
    return None if logprob.token_bytes is None else list(logprob.token_bytes)


def _top_by_text(position: PositionLogprobs, top: Top, naming: Naming) -> dict[str, float]:
    """Return the alternatives and the sampled token by text; of equal texts the first one counts."""
    by_text: dict[str, float] = {}
    chosen = next(iter(position.items()))
    for token_id, logprob in [*_beside(position, top), chosen]:
        by_text.setdefault(naming(token_id, logprob.decoded_token), floored(logprob.logprob))
    return by_text


def _beside(position: PositionLogprobs, top: Top) -> list[tuple[int, Logprob]]:
    if not isinstance(top, int):
        return [(token_id, position[token_id]) for token_id in dict.fromkeys(top)]
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return [item for item in ranked if top < 0 or (item[1].rank or 0) <= top]


def _by_id(position: PositionLogprobs) -> PromptPosition:
    return {
        str(token_id): PromptLogprob(floored(logprob.logprob), logprob.rank, logprob.decoded_token)
        for token_id, logprob in position.items()
    }
