# SPDX-License-Identifier: Apache-2.0
"""Pooling parameters of one request.

Invariant: an instance is valid by itself and frozen; model-dependent checks (tasks, vector sizes) are made elsewhere.
It is a msgspec struct, so it crosses process borders as is.
"""

from __future__ import annotations

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
