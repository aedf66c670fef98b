# SPDX-License-Identifier: Apache-2.0
"""Validation of pooling requests, and tokenization of their texts within length limits.

Invariant: validated parameters name their task and suit the model. Truncation removes text and keeps special tokens,
so a model finds its first and last token where it expects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt, check_cut_text, check_length
from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_files import EncodedText, SpecialTokenTemplate
from quire.errors import ValidationError
from quire.pooling_params import DEFAULT_TEXT_OPTIONS, WHOLE_CONTEXT, PoolingParams, TextOptions


class TruncatingTokenizer:
    """Tokenizer of texts or pairs to at most so many tokens; not thread-safe.

    Args:
        side: "left" or "right", the side that is truncated.
        add_special_tokens: add the tokenizer's special tokens around a text and between two.
    """

    def __init__(self, tokenizer: Tokenizer, *, side: str = "right", add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._special = add_special_tokens
        self._first: tuple[str, list[int]] = ("", [])

    def text(self, text: str, most: int | None) -> EncodedText:
        """Tokenize a text to at most `most` tokens.

        Raises:
            ValidationError: no room for text beside the special tokens, or the text is not valid Unicode.
        """
        if most is None:
            return EncodedText(self._tokenizer.encode(text, add_special_tokens=self._special))
        template, ids = self._template(self._tokenizer.text_template), self._encode(text)
        return template.around(cut(ids, room_in(template, most, 1), self._side))

    def before_text(self, text: str) -> list[int]:
        """Return the tokens of a text that others follow, without the special tokens after a text."""
        template = self._template(self._tokenizer.text_template)
        return [*template.prefix, *self._encode(text)]

    def pair(
        self,
        first: str,
        second: str,
        most: int | None,
        most_each: tuple[int | None, int | None] = (None, None),
    ) -> EncodedText:
        """Tokenize two texts as one prompt of at most `most` tokens; each is truncated to its `most_each` before.

        Raises:
            ValidationError: see `text`.
        """
        template = self._template(self._tokenizer.pair_template)
        if first != self._first[0]:  # many pairs share their query
            self._first = first, self._encode(first)
        one, two = (
            ids if limit is None else cut(ids, limit, self._side)
            for ids, limit in zip((self._first[1], self._encode(second)), most_each, strict=True)
        )
        if most is not None:
            one, two = cut_pair(one, two, room_in(template, most, 2), self._side)
        return template.around(one, two)

    def shortened(self, text: str, most: int | None) -> str:
        """Return the text, or its first or last `most` tokens decoded.

        Raises:
            ValidationError: see `text`.
        """
        ids = [] if most is None else self._encode(text)
        if most is None or len(ids) <= most:
            return text
        return self._tokenizer.decode(cut(ids, most, self._side), skip_special_tokens=False)

    def composed(
        self, first: str, second: str, most: int | None, compose: Callable[[str, str], list[int]]
    ) -> list[int]:
        """Compose a prompt of two texts with at most `most` tokens; the second text is truncated to one token or more.

        A truncated text may have more tokens than it was cut to, where half a character becomes another one.

        Raises:
            ValidationError: no room for the second text; see `text`.
        """
        composed = compose(first, second)
        if most is None or len(composed) <= most:
            return composed
        ids = self._encode(second)
        left = len(ids)
        while len(composed) > most:
            if left <= 1:
                raise ValidationError(
                    "no room for the second text beside the first and the chat template",
                    param="truncate_prompt_tokens",
                )
            # At most half at a time: the prompt may contain a text more than once.
            left = max(left - (len(composed) - most), left // 2)
            rest = self._tokenizer.decode(cut(ids, left, self._side), skip_special_tokens=False)
            composed = compose(first, rest)
        return composed

    def windows(self, text: str, most: int) -> list[list[int]]:
        """Tokenize a text in as few windows of at most `most` tokens as possible, each with its special tokens.

        Raises:
            ValidationError: see `text`.
        """
        template, ids = self._template(self._tokenizer.text_template), self._encode(text)
        size = room_in(template, most, 1)
        starts = range(0, max(len(ids), 1), size)
        return [template.around(ids[start : start + size]).token_ids for start in starts]

    def _template(self, template: SpecialTokenTemplate) -> SpecialTokenTemplate:
        return template if self._special else template.bare()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def room_in(template: SpecialTokenTemplate, most: int, num_texts: int) -> int:
    """Return the tokens of text that fit beside the special tokens.

    Raises:
        ValidationError: less than one token per text is left.
    """
    room = most - template.size
    if room < num_texts:
        raise ValidationError(
            f"{most} tokens have no room for text beside the {template.size} special tokens",
            param="truncate_prompt_tokens",
        )
    return room


def cut(ids: Sequence[int], most: int, side: str) -> list[int]:
    """Return the first `most` ids, or the last if the left side is truncated."""
    excess = max(0, len(ids) - most)
    return list(ids[excess:] if side == "left" else ids[: len(ids) - excess])


def cut_pair(
    first: Sequence[int], second: Sequence[int], most: int, side: str
) -> tuple[list[int], list[int]]:
    """Truncate both texts to `most` ids in all: the longer one first, until they are equally long.

    Source: "longest first" of transformers' tokenizers.
    """
    if len(first) + len(second) <= most:
        return list(first), list(second)
    shorter = min(len(first), len(second), most // 2)
    num_first = shorter if len(first) <= len(second) else most - shorter
    return cut(first, num_first, side), cut(second, most - num_first, side)


QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")
"""Names of the models' prompts for the two sides of a search."""
Compose = Callable[[str, str, str], list[int]]
"""Returns the token ids of a prompt of two texts and the model's instruction, which may be empty."""


class PoolingInputs:
    """Validation and tokenization for one pooling model; thread-safe."""

    def __init__(self, config: EngineConfig, spec: PoolingSpec, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.spec = spec
        self._tokenizer = tokenizer

    def validated(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with their task, checked against the model.

        Raises:
            ValidationError: the model does not support them; see `PoolingSpec.check`.
        """
        self.spec.check(params)
        vocab_size = self.config.arch.vocab_size
        if params.step_tag_id is not None and params.step_tag_id >= vocab_size:
            raise ValidationError(
                f"step_tag_id is {params.step_tag_id}, but token ids are integers in [0, {vocab_size - 1}]",
                param="step_tag_id",
            )
        return msgspec.structs.replace(params, task=self.spec.task_of(params))

    def prompt_named(self, names: tuple[str, ...]) -> str | None:
        """Return the first of these names under which the model has a prompt."""
        known = dict(self.spec.prompts)
        return next((name for name in names if name in known), None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids

    def ids_of(self, words: Iterable[str]) -> frozenset[int]:
        """Return the ids of the words that are tokens."""
        found = () if self._tokenizer is None else map(self._tokenizer.id_of, words)
        return frozenset(token for token in found if token is not None)

    def tokenize(self, parts: PromptParts, options: TextOptions = DEFAULT_TEXT_OPTIONS) -> TokenizedPrompt:
        """Tokenize a prompt; thread-safe.

        Raises:
            ValidationError: a text is empty or too long in any tokenization, or the model has no such prompt.
        """
        most = self._most(options)
        if parts.token_ids is not None:
            return self._cut(parts, parts.token_ids, most, options)
        if parts.second_text is not None:
            return next(self.pairs([(parts.text or "", parts.second_text)], options, parts.cache_salt))
        text = self._whole_text(parts.text or "", options)
        self._check_text(text, is_cut=most is not None)
        encoded = self._fitter(options).text(text, most)
        return self._with_instruction(
            TokenizedPrompt(encoded.token_ids, parts.text, parts.cache_salt), options
        )

    def pairs(
        self, pairs: Iterable[tuple[str, str]], options: TextOptions, cache_salt: str | None = None
    ) -> Iterator[TokenizedPrompt]:
        """Tokenize pairs of texts as one prompt each; a repeated first text is tokenized once.

        Raises:
            ValidationError: see `tokenize`.
        """
        fitter, most, before = self._fitter(options), self._most(options), self._prompt(options)
        for first, second in pairs:
            _check_empty(first, second)
            whole = before + first
            self._check_text(whole, second, is_cut=most is not None)
            encoded = fitter.pair(whole, second, most, options.max_tokens_per_text)
            yield TokenizedPrompt(encoded.token_ids, first, cache_salt, encoded.second_text_start)

    def composed(
        self, pairs: Iterable[tuple[str, str]], options: TextOptions, compose: Compose
    ) -> Iterator[TokenizedPrompt]:
        """Compose one prompt of each pair and the model's own; the second text is truncated.

        Raises:
            ValidationError: see `tokenize`; or raised by `compose`.
        """
        fitter, most, instruction = self._fitter(options), self._most(options), self._prompt(options)

        def written(first: str, second: str) -> list[int]:
            return compose(first, second, instruction)

        for pair in pairs:
            _check_empty(*pair)
            is_cut = most is not None or None not in options.max_tokens_per_text
            self._check_text(*pair, is_cut=is_cut)
            first, second = map(fitter.shortened, pair, options.max_tokens_per_text)
            yield TokenizedPrompt(fitter.composed(first, second, most, written), first)

    def windows(self, text: str, options: TextOptions = DEFAULT_TEXT_OPTIONS) -> list[TokenizedPrompt]:
        """Tokenize a text in as few consecutive prompts as possible, each with its special tokens.

        Raises:
            ValidationError: see `tokenize`.
        """
        whole = self._whole_text(text, options)
        pieces = self._fitter(options).windows(whole, self.config.model.max_model_len)
        first, *others = (TokenizedPrompt(ids, text) for ids in pieces)
        return [self._with_instruction(first, options), *others]

    def _cut(
        self, parts: PromptParts, ids: list[int], most: int | None, options: TextOptions
    ) -> TokenizedPrompt:
        """Truncate a prompt of token ids, whose special tokens are unknown."""
        if most is None or len(ids) <= most:
            return TokenizedPrompt(
                list(ids),
                parts.text,
                parts.cache_salt,
                parts.second_text_start,
                parts.instruction_length,
                media=parts.media,
                leases=parts.leases,
            )
        if parts.instruction_length is not None:
            raise ValidationError(
                "token ids with an instruction cannot be cut", param="truncate_prompt_tokens"
            )
        if parts.second_text_start is not None:
            raise ValidationError(
                "token ids of two texts cannot be cut; send the texts", param="truncate_prompt_tokens"
            )
        if parts.media:
            raise ValidationError(
                f"a prompt of {len(ids)} tokens with media cannot be cut to {most}",
                param="truncate_prompt_tokens",
            )
        return TokenizedPrompt(cut(ids, most, self._side(options)), parts.text, parts.cache_salt)

    def _with_instruction(self, prompt: TokenizedPrompt, options: TextOptions) -> TokenizedPrompt:
        """Mark the tokens of the model's prompt, if they are not pooled."""
        before = self._prompt(options)
        if self.spec.include_prompt or not before:
            return prompt
        length = len(self._fitter(options).before_text(before))
        return replace(prompt, instruction_length=min(length, len(prompt.token_ids) - 1) or None)

    def _side(self, options: TextOptions) -> str:
        own = "right" if self._tokenizer is None else self._tokenizer.truncation_side
        return options.truncation_side or own

    def _fitter(self, options: TextOptions) -> TruncatingTokenizer:
        if self._tokenizer is None:
            raise ValidationError("text prompts need a tokenizer; pass token ids", param="prompt")
        return TruncatingTokenizer(
            self._tokenizer, side=self._side(options), add_special_tokens=options.add_special_tokens
        )

    def _whole_text(self, text: str, options: TextOptions) -> str:
        """Return the text after the model's prompt."""
        _check_empty(text)
        return self._prompt(options) + text

    def _prompt(self, options: TextOptions) -> str:
        """Return the model's prompt before a text."""
        name = self.spec.default_prompt if options.prompt_name is None else options.prompt_name
        known = dict(self.spec.prompts)
        if name and name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValidationError(f"the model has no prompt {name!r:.100}; {has}", param="prompt_name")
        return known.get(name or "", "")

    def _most(self, options: TextOptions) -> int | None:
        """Return the tokens to which a prompt is truncated."""
        most, limit = options.truncate_prompt_tokens, self.config.model.max_model_len
        return limit if most == WHOLE_CONTEXT else most

    def _check_text(self, *texts: str, is_cut: bool) -> None:
        """Check the length before tokenization, which is slow for a long text."""
        if is_cut:
            for text in texts:
                check_cut_text(self.config, text)
        elif self._tokenizer is not None and sum(map(len, texts)) > self.config.model.max_model_len:
            check_length(self.config, sum(map(self._tokenizer.min_num_tokens, texts)), "at least ")


def _check_empty(*texts: str) -> None:
    if not all(texts):
        raise ValidationError("the prompt must not be empty", param="prompt")
