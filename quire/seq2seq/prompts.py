# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoder-decoder models: the encoder's text and the decoder's first tokens to one prompt of the engine.

Invariant: torch-free. A prompt's first positions take the encoder's output, one row per token of its text, up to whole
blocks; then the decoder's prompt follows, which begins with the checkpoint's start token.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.config.arch import encoder_positions
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import Tokenizer
from quire.errors import ContextLengthError, ValidationError
from quire.media import MediaItem
from quire.models.json_object import JsonObject
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.seq2seq.settings import read_settings, whole_config

ENCODER, DECODER = "encoder_prompt", "decoder_prompt"
SOURCE, TARGET = "source_language", "target_language"
FIELDS = (ENCODER, DECODER, SOURCE, TARGET)
_VERSION = b"quire text 1"
_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
"""Language tokens: en_XX of mBART, eng_Latn of NLLB, __en__ of M2M-100."""
_MOST_NAMED = 12


@dataclass(frozen=True)
class PromptOptions:
    """Decoder prompt and languages beside an encoder's text."""

    decoder: str | list[int] | None = None
    source: str | None = None
    target: str | None = None


class EncoderPrompts:
    """Prompts of one model.

    Args:
        config: resolved.
        tokenizer: None: prompts are token ids.

    Raises:
        ModelLoadError: the checkpoint's generation config is malformed.
    """

    begins_with_start = True
    """The start token comes before a decoder's prompt that does not begin with it."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        part_of = config.arch.part_of
        assert part_of is not None, "an encoder belongs to a whole model"
        self._config = config
        self._whole = part_of
        self._tokenizer = tokenizer
        file = JsonObject(config.model_dir, whole_config(config))
        self._vocab_size = file.integer("vocab_size", config.arch.vocab_size)
        self._settings = read_settings(config)
        self._languages = {} if tokenizer is None else _languages(tokenizer)

    def split(self, prompt: Any) -> tuple[Any, PromptOptions]:
        """Return the encoder's prompt in any plain form, and the rest.

        Raises:
            ValidationError: a field has a wrong type, or does not go with another.
        """
        if not isinstance(prompt, dict) or not any(name in prompt for name in FIELDS):
            return prompt, PromptOptions()
        rest = {name: value for name, value in prompt.items() if name not in FIELDS}
        options = self._options(prompt)
        if ENCODER not in prompt:
            return rest, options
        if "prompt" in rest or "prompt_token_ids" in rest:
            raise ValidationError(
                f"{ENCODER!r} takes the place of 'prompt' and 'prompt_token_ids'", param=ENCODER
            )
        inner = prompt[ENCODER]
        named = {"prompt": inner} if isinstance(inner, str) else inner
        named = {"prompt_token_ids": named} if isinstance(named, list) else named
        if not isinstance(named, dict):
            raise ValidationError(
                f"{ENCODER!r} must be text, token ids, or a dict with either, got {type(inner).__name__}",
                param=ENCODER,
            )
        return {**named, **rest}, options

    def _options(self, prompt: Mapping[str, Any]) -> PromptOptions:
        decoder = self._decoder(prompt)
        source, target = (self._language(name, prompt.get(name)) for name in (SOURCE, TARGET))
        if target is not None and decoder is not None:
            raise ValidationError(
                f"{TARGET!r} and {DECODER!r} both say how the decoder begins; give one", param=TARGET
            )
        return PromptOptions(decoder, source, target)

    @staticmethod
    def _decoder(prompt: Mapping[str, Any]) -> str | list[int] | None:
        """Return the decoder's prompt in a plain form."""
        decoder = prompt.get(DECODER)
        if isinstance(decoder, dict):
            decoder = decoder.get("prompt_token_ids", decoder.get("prompt"))
        is_ids = isinstance(decoder, list) and all(type(token) is int for token in decoder)
        if decoder is not None and not isinstance(decoder, str) and not is_ids:
            raise ValidationError(f"{DECODER!r} must be text or token ids", param=DECODER)
        return decoder

    def _language(self, field: str, name: Any) -> str | None:
        """Return a language's token."""
        if name is None:
            return None
        if not self._languages:
            raise ValidationError(
                f"{field!r} is for models with tokens of languages, and this model has none", param=field
            )
        for token in (name, f"__{name}__"):
            if isinstance(name, str) and token in self._languages:
                return token
        known = sorted(self._languages)
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        raise ValidationError(
            f"{field} is {name!r:.100}; this model's languages are {', '.join(known[:_MOST_NAMED])}{more}",
            param=field,
        )

    def joined(self, prompt: TokenizedPrompt, options: PromptOptions) -> TokenizedPrompt:
        """Return the whole prompt.

        Raises:
            ValidationError: the encoder's text is empty or too long, the decoder's prompt is.
        """
        images = [item for item in prompt.media if item.kind == "image"]
        if prompt.media and not images:
            return prompt
        self._check_ids(prompt.token_ids)
        ids = self._from(_with_image_first(prompt.token_ids, images), options.source)
        self._check_places(ids, images)
        most = self._whole.encoder_length
        if len(ids) > most:
            raise ContextLengthError(
                f"This model's maximum input length is {most} tokens, but there are {len(ids)} tokens in the prompt; "
                "the prompt is too long",
                param="prompt",
            )
        decoder, num_forced = self._decoder_ids(options)
        end = encoder_positions(len(ids))
        digest = _digest(self._whole.architecture, ids, *(image.digest for image in images))
        path = images[0].path if images else ""
        item = MediaItem(digest, "text", 0, end, [(0, len(ids))], path, token_ids=ids)
        return replace(
            prompt,
            # Penalties count a prompt's tokens: the start token is one of the decoder's anyway.
            token_ids=[*[self._settings.start] * end, *decoder],
            media=(item,),
            num_forced=num_forced,
            num_encoded=end,
        )

    def _check_places(self, ids: list[int], images: Sequence[MediaItem]) -> None:
        """Check that a prompt has a place for each row of its image, and no other."""
        tokens = self._whole.placeholder_ids
        found, wanted = sum(token in tokens for token in ids), sum(image.num_embeddings for image in images)
        if found != wanted:
            raise ValidationError(
                f"the prompt has {found} tokens in whose places rows of an image stand, and {wanted} rows; send the "
                "image as such, and text without the token",
                param="prompt",
            )

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ValidationError("the prompt must not be empty", param="prompt")
        for token in ids:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValidationError(
                    f"prompt has {token!r}, but token ids are integers in [0, {self._vocab_size - 1}]",
                    param="prompt",
                )

    def _from(self, ids: list[int], source: str | None) -> list[int]:
        """Return ids with the source language's token in place of the tokenizer's own."""
        if source is None:
            return ids
        assert self._tokenizer is not None, "languages are the tokenizer's"
        codes, wanted = set(self._languages.values()), self._languages[source]
        around = self._tokenizer.encode("", add_special_tokens=True)
        places = [
            place if place == 0 else place - len(around) for place, one in enumerate(around) if one in codes
        ]
        found = list(ids)
        for place in places:
            if len(found) >= len(around) and found[place] in codes:
                found[place] = wanted
        if wanted not in found:
            raise ValidationError(
                f"{SOURCE} has no effect: this model's tokenizer puts no language around a text", param=SOURCE
            )
        return found

    def _decoder_ids(self, options: PromptOptions) -> tuple[list[int], int]:
        """Return the decoder's prompt, and how many of its last tokens count as generated."""
        settings = self._settings
        ids, first = self._given(options.decoder), settings.forced_first
        if options.target is not None:
            language = self._languages[options.target]
            if settings.start in self._languages.values():
                return [language], 0
            first = language
        if not ids or (self.begins_with_start and ids[:1] != [settings.start]):
            ids = [settings.start, *ids]
        most = self._whole.decoder_length
        if len(ids) >= most:
            raise ContextLengthError(
                f"This model's decoder has {most} positions, but there are {len(ids)} tokens in {DECODER!r}; one more "
                "must fit",
                param=DECODER,
            )
        return ([*ids, first], 1) if len(ids) == 1 and first is not None else (ids, 0)

    def _given(self, decoder: str | list[int] | None) -> list[int]:
        if not isinstance(decoder, str):
            return list(decoder or ())
        if self._tokenizer is None:
            raise ValidationError("text prompts need a tokenizer; pass token ids", param=DECODER)
        return self._tokenizer.encode_target(decoder)

    def sampled(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that ban the tokens which the checkpoint never generates."""
        banned = tuple((token,) for token in self._settings.banned)
        if not banned:
            return params
        return params.replace_unchecked(bad_words_token_ids=(*params.bad_words_token_ids, *banned))

    def searched(self, prompt: TokenizedPrompt, params: BeamSearchParams) -> BeamSearchParams:
        """Return beam search parameters with the checkpoint's forced and banned tokens."""
        settings, ids = self._settings, tuple(prompt.token_ids[prompt.media[0].end :])
        return msgspec.structs.replace(
            params,
            forced_last_token_id=settings.forced_last,
            banned_token_ids=settings.banned,
            decoder_token_ids=ids,
            num_forced_tokens=prompt.num_forced,
        )

    def shown(self, params: BeamSearchParams) -> BeamSearchParams:
        """Return beam search parameters with the special tokens that belong to the model's texts."""
        return params

    def default_search(self) -> BeamSearchParams:
        """Return the checkpoint's own beam search, with lengths of generated tokens."""
        num_prompt = len(self._decoder_ids(PromptOptions())[0])
        own = self._settings.search
        return msgspec.structs.replace(
            own,
            max_tokens=max(own.max_tokens - num_prompt, 1),
            min_tokens=max(own.min_tokens - num_prompt, 0),
        )


def _with_image_first(ids: list[int], images: Sequence[MediaItem]) -> list[int]:
    """Return ids with the places of an image, which stand behind the tokenizer's first token, before all others.

    Raises:
        ValidationError: there is more than one image.
    """
    if not images:
        return ids
    if len(images) > 1:
        raise ValidationError(f"the model reads one image per prompt, got {len(images)}", param="prompt")
    ((start, end),) = images[0].runs
    return [*ids[start:end], *ids[:start], *ids[end:]]


def _digest(architecture: str, ids: list[int], *images: bytes) -> bytes:
    head = b"%s\0%s\0%s" % (_VERSION, architecture.encode(), b"".join(images))
    return hashlib.sha256(head + np.asarray(ids, dtype=np.int64).tobytes()).digest()


def _languages(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of languages, with their ids."""
    ids = tokenizer.vocabulary()
    return {name: ids[name] for name in tokenizer.special_tokens if name in ids and _LANGUAGE.fullmatch(name)}
