# SPDX-License-Identifier: Apache-2.0
"""Pooling parameters of one request, and options of tokenizing its texts.

Invariant: an instance is valid by itself and frozen; model-dependent checks (tasks, vector sizes) are made elsewhere.
It is a msgspec struct, so it crosses process borders as is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.errors import ValidationError
from quire.vllm_names.parameters import KeywordCheck

EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY = "embed", "classify", "token_embed", "token_classify"
# Numbers per text (vector; classes, score, reward) or per token.
POOLING_TASKS = (EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY)


class PoolingParams(
    msgspec.Struct, metaclass=KeywordCheck, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """Pooling parameters of one request; names and defaults are vLLM's.

    Args:
        use_activation: apply the model's activation (for an embedding the norm, for classes softmax or sigmoid);
            None leaves it to the model.
        dimensions: truncate an embedding to this size, at least 1; None keeps all.
        step_tag_id: token that ends a step, for step rewards; None leaves it to the model.
        returned_token_ids: classes to return, for step rewards; None: all.
        task: of `POOLING_TASKS`; None is the model's default.

    Raises:
        ValidationError: a value is of the wrong type or out of range; `param` names it.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.use_activation, bool | None):
            raise ValidationError(
                f"use_activation must be true or false, got {self.use_activation!r}", param="use_activation"
            )
        for name, least in (("dimensions", 1), ("step_tag_id", 0)):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= least):
                raise ValidationError(
                    f"{name} must be an integer of at least {least}, got {value!r}", param=name
                )
        ids = self.returned_token_ids
        if ids is not None and not (
            isinstance(ids, list) and ids and all(_is_int(i) and i >= 0 for i in ids)
        ):
            raise ValidationError(
                f"returned_token_ids must be a list of integers of at least 0, got {ids!r}",
                param="returned_token_ids",
            )
        if self.task is not None and self.task not in POOLING_TASKS:
            raise ValidationError(
                f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}", param="task"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


SIDES = ("left", "right")
WHOLE_CONTEXT = -1


@dataclass(frozen=True)
class TextOptions:
    """Options of tokenization of a request.

    Args:
        truncate_prompt_tokens: longer prompts are truncated to so many; -1: to the model's context; None: refused.
        truncation_side: "left" or "right"; None: the tokenizer's.
        prompt_name: the model's prompt before a text; None: its default, "": none.
        add_special_tokens: add the tokenizer's special tokens around a text.
        max_tokens_per_text: limits to which the texts of a pair are truncated; None: no limit.

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
        """Return these options with vLLM's `tokenization_kwargs` applied.

        Raises:
            ValidationError: an unknown key or an invalid value.
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
DEFAULT_TEXT_OPTIONS = TextOptions()
