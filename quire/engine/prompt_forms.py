# SPDX-License-Identifier: Apache-2.0
"""Forms of prompts, their internal form, and limits of their lengths and media, before the request costs anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.config.arch import Multimodal, encoder_positions
from quire.engine.tokenizer_cache import TokenizerContext
from quire.errors import ContextLengthError, ValidationError
from quire.inputs import PromptType, TokensPrompt
from quire.media import MediaItem, check_media, num_embeddings

# Per token of context, for texts that are truncated or only counted: some sixteen contexts of prose.
CUT_CHARS_PER_TOKEN = 64
LEAST_CUT_CHARS = 2**18  # Lower bound of that limit; tokenizing so much takes a fraction of a second.


@dataclass(frozen=True)
class TokenizedPrompt:
    """Prompt in its internal form, with its own list of ids; `text` is only for the output."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    second_text_start: int | None = None
    instruction_length: int | None = None
    tokenizer_context: TokenizerContext | None = None  # Context it was tokenized with; None: the model's.
    media: tuple[MediaItem, ...] = ()
    leases: tuple[object, ...] = ()  # Keep the files of the media until the request has ended.
    kv_transfer_params: Any = None  # As the caller gave them, unchecked.
    # Last tokens of a decoder's prompt that count as generated, such as a forced first token.
    num_forced: int = 0
    num_encoded: int = 0  # First positions that take the output of an encoder of a text or an image.

    @property
    def given_ids(self) -> list[int]:
        """Token ids that outputs report: those of the text that an encoder reads, or else all behind its output."""
        is_text = len(self.media) == 1 and self.media[0].kind == "text"
        return self.media[0].token_ids if is_text else self.token_ids[self.num_encoded :]

    def as_prompt(self) -> TokensPrompt:
        """Return the prompt in the callers' form."""
        prompt = TokensPrompt(prompt_token_ids=self.token_ids)
        for name in ("cache_salt", "second_text_start", "instruction_length", "kv_transfer_params"):
            if (value := getattr(self, name)) is not None:
                prompt[name] = value
        if self.text is not None:
            prompt["prompt"] = self.text
        if self.media:
            prompt["media"], prompt["leases"] = self.media, self.leases
        return prompt


@dataclass(frozen=True)
class PromptParts:
    """Prompt before tokenizing: `token_ids`, or `text`, or `text` with a second one."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    second_text: str | None = None
    second_text_start: int | None = None
    instruction_length: int | None = None
    media: tuple[MediaItem, ...] = ()
    leases: tuple[object, ...] = ()
    kv_transfer_params: Any = None


def parts_of(prompt: PromptType) -> PromptParts:
    """Parse any form of prompt.

    Raises:
        ValidationError: it has none of the forms.
    """
    if isinstance(prompt, str):
        return PromptParts(prompt)
    if isinstance(prompt, list):
        return PromptParts(token_ids=prompt)
    if not isinstance(prompt, dict):
        raise ValidationError(
            f"a prompt must be text or token ids, got {type(prompt).__name__}", param="prompt"
        )
    return _parts_of_dict(dict(prompt))


def _parts_of_dict(prompt: dict[str, Any]) -> PromptParts:
    salt, start = prompt.pop("cache_salt", None), prompt.pop("second_text_start", None)
    instruction, transfer = prompt.pop("instruction_length", None), prompt.pop("kv_transfer_params", None)
    token_ids = prompt.pop("prompt_token_ids", None)
    text, second = prompt.pop("prompt", None), prompt.pop("second_prompt", None)
    media, leases = _items(prompt.pop("media", ())), tuple(prompt.pop("leases", ()))
    if prompt:
        raise ValidationError(f"unknown prompt field {next(iter(prompt))!r}", param="prompt")
    for name, value in (("prompt", text), ("second_prompt", second)):
        if value is not None and not isinstance(value, str):
            raise ValidationError(f"{name!r} must be text, got {type(value).__name__}", param="prompt")
    if token_ids is None and text is None:
        raise ValidationError("a prompt needs 'prompt' or 'prompt_token_ids'", param="prompt")
    if token_ids is not None and not isinstance(token_ids, list):
        raise ValidationError(
            f"'prompt_token_ids' must be a list, got {type(token_ids).__name__}", param="prompt"
        )
    if second is not None and token_ids is not None:
        raise ValidationError("'second_prompt' needs 'prompt', and no 'prompt_token_ids'", param="prompt")
    for name, place in (("second_text_start", start), ("instruction_length", instruction)):
        if place is not None and not (token_ids and type(place) is int and 0 < place < len(token_ids)):
            raise ValidationError(
                f"{name!r} must be the index of one of 'prompt_token_ids', and not of the first",
                param="prompt",
            )
    if media and token_ids is None:
        raise ValidationError("'media' needs 'prompt_token_ids', whose positions it fills", param="media")
    return PromptParts(text, token_ids, salt, second, start, instruction, media, leases, transfer)


def _items(media: Any) -> tuple[MediaItem, ...]:
    is_sequence = isinstance(media, Sequence)
    if not is_sequence or not all(isinstance(item, MediaItem) for item in media):
        raise ValidationError("'media' must be a sequence of MediaItem", param="media")
    return tuple(media)


def check_cut_text(config: EngineConfig, text: str, name: str = "prompt") -> None:
    """Reject an overlong text that is truncated or only counted, and so may be longer than the context.

    Args:
        name: of the text's field.

    Raises:
        ValidationError: with the limit.
    """
    limit = max(CUT_CHARS_PER_TOKEN * config.model.max_model_len, LEAST_CUT_CHARS)
    if len(text) > limit:
        raise ValidationError(
            f"there are {len(text)} characters in the {name}; where a text is cut or only counted there may be "
            f"{limit}: {CUT_CHARS_PER_TOKEN} for each token of the context, or {LEAST_CUT_CHARS} if that is more",
            param=name,
        )


def check_length(config: EngineConfig, num_tokens: int, how_exact: str = "") -> None:
    """Reject a prompt that is too long for the model; called before any work per token.

    A generating model must have room for one more token.

    Raises:
        ContextLengthError: longer than the context; ValidationError: longer than a step that may not split it.
    """
    limit, pools = config.model.max_model_len, config.pooling is not None
    if num_tokens > limit - (0 if pools else 1):
        # Clients match on these words, some on the first and some on the last.
        needs_room = "" if pools else ", which must leave room for one more"
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, but there are {how_exact}{num_tokens} tokens "
            f"in the prompt{needs_room}; the prompt is too long",
            param="prompt",
        )
    budget = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and num_tokens > budget:
        raise ValidationError(
            f"there are {how_exact}{num_tokens} tokens in the prompt; without chunked prefill a step takes "
            f"{budget}",
            param="prompt",
        )


def check_prompt_media(config: EngineConfig, ids: Sequence[int], media: Sequence[MediaItem]) -> None:
    """Check the items of a prompt, and that placeholder tokens stand where an item puts them and nowhere else.

    Raises:
        ValidationError: names the item or the token, the limit and its option.
    """
    part_of = config.arch.part_of
    if part_of is not None and part_of.encoder_positions:
        _check_encoded(media, part_of)
    if media:
        check_media(media, len(ids), config.scheduler.max_num_batched_tokens)
        for item in media:
            _check_kind(config, item)
        _check_counts(config, media)
        _check_room(config, media)
    if part_of is not None and not part_of.placeholder_ids.isdisjoint(ids):
        _check_placeholders(ids, media, part_of)


def _check_encoded(media: Sequence[MediaItem], part_of: Multimodal) -> None:
    """Check that the prompt of a model with cross-attention begins with the encoder's output, and has no other."""
    if part_of.reads_text:
        _check_text(media, part_of)
        return
    bounds = [(item.start, item.end) for item in media]
    if bounds == [(0, part_of.encoder_positions)]:
        return
    if part_of.reads_images:
        raise ValidationError(
            f"{part_of.architecture} reads one image per prompt, got {len(media)}", param="prompt"
        )
    raise ValidationError(
        f"{part_of.architecture} transcribes: a prompt begins with one sound in its first "
        f"{part_of.encoder_positions} positions, got {bounds or 'none'}; use /v1/audio/transcriptions or "
        "LLM.transcribe",
        param="prompt",
    )


def _check_text(media: Sequence[MediaItem], part_of: Multimodal) -> None:
    """Check the one item of a prompt whose encoder reads text: it fills the first positions, one row per token."""
    if len(media) != 1 or media[0].kind != "text":
        kinds = [item.kind for item in media] or "none"
        raise ValidationError(
            f"{part_of.architecture} reads one text per prompt, got media of kind {kinds}", param="prompt"
        )
    (item,) = media
    count = len(item.token_ids)
    if not 0 < count <= part_of.encoder_length:
        raise ContextLengthError(
            f"This model's maximum input length is {part_of.encoder_length} tokens, but there are {count} tokens in "
            "the prompt; the prompt is too long",
            param="prompt",
        )
    if (item.start, item.end, item.runs) != (0, encoder_positions(count), [(0, count)]):
        raise ValidationError(
            f"the text of a prompt must fill its first {encoder_positions(count)} positions, the first {count} of them "
            f"with a row per token, got [{item.start}, {item.end}) with {item.runs}",
            param="media",
        )


def _check_kind(config: EngineConfig, item: MediaItem) -> None:
    options = config.multimodal
    if item.kind == "embeds":
        if not (options.enable_prompt_embeds or options.enable_mm_embeds):
            raise ValidationError(
                "embeddings are not accepted here (--enable-prompt-embeds, --enable-mm-embeds)", param="media"
            )
    elif config.arch.part_of is None:
        raise ValidationError(f"the prompt has an {item.kind}, and this model takes text only", param="media")
    elif options.language_model_only:
        raise ValidationError(
            f"the prompt has an {item.kind}, and only the language model is served (--language-model-only)",
            param="media",
        )


def _check_counts(config: EngineConfig, media: Sequence[MediaItem]) -> None:
    for kind, count in Counter(item.kind for item in media).items():
        limit = config.multimodal.most_items(kind)
        if count > limit:
            raise ValidationError(
                f"the prompt has {count} inputs of kind {kind!r}, the limit is {limit} (--limit-mm-per-prompt)",
                param="media",
            )


def _check_room(config: EngineConfig, media: Sequence[MediaItem]) -> None:
    """Check that the embeddings of a request fit into the encoder cache, which must hold all of them at once."""
    needed, limit = num_embeddings(media) * config.embedding_bytes, config.multimodal.encoder_cache_bytes
    if needed > limit:
        raise ValidationError(
            f"the embeddings of the prompt's media take {needed} bytes, and the encoder cache has {limit}: send fewer "
            "or smaller ones, or start with a larger --encoder-cache-gb",
            param="media",
        )


def _check_placeholders(ids: Sequence[int], media: Sequence[MediaItem], part_of: Multimodal) -> None:
    for part in _outside(ids, media):
        found = part_of.placeholder_ids.intersection(part)
        if found:
            raise ValidationError(
                f"the prompt has the token {min(found)}, in whose place {part_of.architecture} puts an image, a video "
                "or a sound, and none is sent for that place: send it as such, or text without the token",
                param="prompt",
            )


def _outside(ids: Sequence[int], media: Sequence[MediaItem]) -> Iterator[Sequence[int]]:
    """Yield the parts of a prompt between its items."""
    position = 0
    for item in media:
        yield ids[position : item.start]
        position = item.end
    yield ids[position:]
