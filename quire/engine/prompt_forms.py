"""What a caller may pass as a prompt, in its one internal form, and how long it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.engine.lexicons import Lexicon
from quire.errors import ContextLengthError, ValidationError
from quire.inputs import PromptType, TokensPrompt

CUT_CHARS_PER_TOKEN = 64
"""So many characters for each token of the context may a text have that is cut: some sixteen contexts of prose."""
LEAST_CUT_CHARS = 2**18
"""So many it may have however short the context is, which takes a fraction of a second."""


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt in its one internal form, in a list of its own; `text` is only for the output."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    second_text_start: int | None = None
    instruction_length: int | None = None
    lexicon: Lexicon | None = None
    """Of the adapter that it was tokenized for; None: the model's."""

    def as_prompt(self) -> TokensPrompt:
        """As callers pass it."""
        prompt = TokensPrompt(prompt_token_ids=self.token_ids)
        for name in ("cache_salt", "second_text_start", "instruction_length"):
            if (value := getattr(self, name)) is not None:
                prompt[name] = value
        if self.text is not None:
            prompt["prompt"] = self.text
        return prompt


@dataclass(frozen=True)
class PromptParts:
    """A prompt before it is tokenized: it has `token_ids`, or `text`, or `text` with a second one."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    second_text: str | None = None
    second_text_start: int | None = None
    instruction_length: int | None = None


def parts_of(prompt: PromptType) -> PromptParts:
    """Take any form of prompt apart.

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
    instruction = prompt.pop("instruction_length", None)
    token_ids = prompt.pop("prompt_token_ids", None)
    text, second = prompt.pop("prompt", None), prompt.pop("second_prompt", None)
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
    return PromptParts(text, token_ids, salt, second, start, instruction)


def check_cut_text(config: EngineConfig, text: str, name: str = "prompt") -> None:
    """Refuse a text that is cut or only counted, and so may be longer than the context, but not of any length.

    Args:
        name: of the field whose text it is.

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
    """Refuse a prompt that the model cannot take; asked before anything walks over its tokens.

    A model that generates must have room for one more.

    Raises:
        ContextLengthError: it is longer than the context; ValidationError: than a step that may not split it.
    """
    limit, pools = config.model.max_model_len, config.pooling is not None
    if num_tokens > limit - (0 if pools else 1):
        # Clients know it by these words where they do not read its code: some by the first, some by the last.
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
