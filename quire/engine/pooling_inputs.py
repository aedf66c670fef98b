"""What a request to a pooling model is checked against, and how its texts become tokens.

Invariant: parameters that leave here name their task and fit the model; a text that is cut keeps the special tokens
around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.engine.fitting import SIDES, Fitter, cut
from quire.engine.prompt_forms import PromptParts, TokenizedPrompt, check_cut_text, check_length
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.pooling_params import PoolingParams

QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")
"""What models call the prompts of the two sides of a search."""
WHOLE_CONTEXT = -1


@dataclass(frozen=True)
class TextOptions:
    """How the texts of a request become tokens.

    Args:
        truncate_prompt_tokens: a longer prompt is cut to so many; -1: to the model's context; None: it is refused.
        truncation_side: "left" or "right", where it is cut off; None: where the model's tokenizer cuts.
        prompt_name: which of the model's prompts stands before a text; None: its default, "": none.
        add_special_tokens: put those around a text that the model's tokenizer puts there.
        max_tokens_per_text: of the first and of the second text of a pair, which are cut to so many; None: any number.

    Raises:
        ValidationError: a value is out of range.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_name: str | None = None
    add_special_tokens: bool = True
    max_tokens_per_text: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        most = self.truncate_prompt_tokens
        if most is not None and most != WHOLE_CONTEXT and (type(most) is not int or most < 1):
            raise ValidationError(
                f"truncate_prompt_tokens must be at least 1, or -1 for the model's context, got {most!r}",
                param="truncate_prompt_tokens",
            )
        if self.truncation_side not in (None, *SIDES):
            raise ValidationError(
                f"truncation_side must be left or right, got {self.truncation_side!r}",
                param="truncation_side",
            )

    def with_kwargs(self, tokenization_kwargs: Mapping[str, Any] | None) -> TextOptions:
        """What vLLM's callers say of a tokenizer, over these.

        Raises:
            ValidationError: a key is none that is known, or its value is none that it may have.
        """
        said = dict(tokenization_kwargs or {})
        unknown = sorted(said.keys() - _KWARGS)
        if unknown:
            raise ValidationError(
                f"tokenization_kwargs has {unknown[0]!r:.60}; known are {', '.join(sorted(_KWARGS))}",
                param="tokenization_kwargs",
            )
        cuts, most = said.pop("truncation", None), said.pop("max_length", None)
        if most is not None and cuts is not True:
            raise ValidationError(
                "tokenization_kwargs has max_length, which needs truncation: true",
                param="tokenization_kwargs",
            )
        if cuts is not None:
            said.setdefault(
                "truncate_prompt_tokens", (WHOLE_CONTEXT if most is None else most) if cuts else None
            )
        return replace(self, **said)


_KWARGS = {"truncate_prompt_tokens", "truncation_side", "add_special_tokens", "truncation", "max_length"}
AS_THEY_ARE = TextOptions()


Compose = Callable[[str, str, str], list[int]]
"""Token ids of a prompt of two texts and what the model wants to be told before them, which may be empty."""


class PoolingInputs:
    """Checks and tokenizes for one pooling model; threads may share one."""

    def __init__(self, config: EngineConfig, spec: PoolingSpec, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.spec = spec
        self._tokenizer = tokenizer

    def settled(self, params: PoolingParams) -> PoolingParams:
        """The parameters with their task, after all checks against the model.

        Raises:
            ValidationError: it is none of the model's; see `PoolingSpec.check`.
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
        """The first of these names under which the model has a prompt."""
        known = dict(self.spec.prompts)
        return next((name for name in names if name in known), None)

    @property
    def special_ids(self) -> frozenset[int]:
        """Of tokens that are no part of a text."""
        return frozenset() if self._tokenizer is None else self._tokenizer.special_ids

    def ids_of(self, words: Iterable[str]) -> frozenset[int]:
        """Of those of the words that are tokens."""
        found = () if self._tokenizer is None else map(self._tokenizer.id_of, words)
        return frozenset(token for token in found if token is not None)

    def tokenize(self, parts: PromptParts, options: TextOptions = AS_THEY_ARE) -> TokenizedPrompt:
        """Token ids of a prompt; safe to call from several threads.

        Raises:
            ValidationError: a text is empty or too long however it is tokenized, or the model has no such prompt.
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
        """Each two texts as one prompt; a first text that comes again and again is tokenized once.

        Raises:
            ValidationError: as `tokenize`.
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
        """Each two texts as the prompt that is composed of them and the model's own; it is the second that is cut.

        Raises:
            ValidationError: as `tokenize`, or those of `compose`.
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

    def windows(self, text: str, options: TextOptions = AS_THEY_ARE) -> list[TokenizedPrompt]:
        """The text in as few prompts as it fits into, one behind the other, each with its special tokens.

        Raises:
            ValidationError: as `tokenize`.
        """
        whole = self._whole_text(text, options)
        pieces = self._fitter(options).windows(whole, self.config.model.max_model_len)
        first, *others = (TokenizedPrompt(ids, text) for ids in pieces)
        return [self._with_instruction(first, options), *others]

    def _cut(
        self, parts: PromptParts, ids: list[int], most: int | None, options: TextOptions
    ) -> TokenizedPrompt:
        """Token ids that came as such, of which nobody knows which are special."""
        if most is None or len(ids) <= most:
            return TokenizedPrompt(
                list(ids), parts.text, parts.cache_salt, parts.second_text_start, parts.instruction_length
            )
        if parts.instruction_length is not None:
            raise ValidationError(
                "token ids with an instruction cannot be cut", param="truncate_prompt_tokens"
            )
        if parts.second_text_start is not None:
            raise ValidationError(
                "token ids of two texts cannot be cut; send the texts", param="truncate_prompt_tokens"
            )
        return TokenizedPrompt(cut(ids, most, self._side(options)), parts.text, parts.cache_salt)

    def _with_instruction(self, prompt: TokenizedPrompt, options: TextOptions) -> TokenizedPrompt:
        """Says which tokens are those of the model's prompt, if vectors are not made of them."""
        before = self._prompt(options)
        if self.spec.include_prompt or not before:
            return prompt
        length = len(self._fitter(options).before_text(before))
        return replace(prompt, instruction_length=min(length, len(prompt.token_ids) - 1) or None)

    def _side(self, options: TextOptions) -> str:
        own = "right" if self._tokenizer is None else self._tokenizer.truncation_side
        return options.truncation_side or own

    def _fitter(self, options: TextOptions) -> Fitter:
        if self._tokenizer is None:
            raise ValidationError("text prompts need a tokenizer; pass token ids", param="prompt")
        return Fitter(
            self._tokenizer, side=self._side(options), add_special_tokens=options.add_special_tokens
        )

    def _whole_text(self, text: str, options: TextOptions) -> str:
        """With the model's prompt before it."""
        _check_empty(text)
        return self._prompt(options) + text

    def _prompt(self, options: TextOptions) -> str:
        """What the model wants to stand before a text."""
        name = self.spec.default_prompt if options.prompt_name is None else options.prompt_name
        known = dict(self.spec.prompts)
        if name and name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValidationError(f"the model has no prompt {name!r:.100}; {has}", param="prompt_name")
        return known.get(name or "", "")

    def _most(self, options: TextOptions) -> int | None:
        """Tokens to which a prompt is cut."""
        most, limit = options.truncate_prompt_tokens, self.config.model.max_model_len
        return limit if most == WHOLE_CONTEXT else most

    def _check_text(self, *texts: str, is_cut: bool) -> None:
        """Before they are tokenized, which takes long for a long text."""
        if is_cut:
            for text in texts:
                check_cut_text(self.config, text)
        elif self._tokenizer is not None and sum(map(len, texts)) > self.config.model.max_model_len:
            check_length(self.config, sum(map(self._tokenizer.min_num_tokens, texts)), "at least ")


def _check_empty(*texts: str) -> None:
    if not all(texts):
        raise ValidationError("the prompt must not be empty", param="prompt")
