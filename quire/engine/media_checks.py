# SPDX-License-Identifier: Apache-2.0
"""Checks of a prompt's media against the model and the options, before the request costs anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from quire.config import EngineConfig
from quire.config.arch import Multimodal, encoder_positions
from quire.errors import ContextLengthError, ValidationError
from quire.media import MediaItem, check_media, num_embeddings

MOST_ITEMS = 999
"""Most items of a kind in a prompt if --limit-mm-per-prompt does not name it."""


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
        f"{part_of.architecture} writes what it hears: a prompt begins with one sound in its first "
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
        said = config.multimodal.limit_mm_per_prompt.get(kind, MOST_ITEMS)
        limit = said.get("count", MOST_ITEMS) if isinstance(said, dict) else said
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
