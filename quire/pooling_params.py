"""`PoolingParams`: what one request wants of its prompt instead of tokens.

Invariant: an instance that exists is valid on its own, and stays so, because it is frozen; what depends on the model
(its tasks, how long its vectors are) is checked where the model is known. It is a msgspec struct, so it crosses process
borders as is.
"""

from __future__ import annotations

import msgspec

from quire.errors import ValidationError

POOLING_TASKS = ("embed", "classify")


class PoolingParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """Pooling parameters of one request; names and defaults are vLLM's.

    Args:
        use_activation: apply the model's last function (for an embedding the norm, for classes softmax or sigmoid);
            None leaves it to the model.
        dimensions: keep so many numbers of an embedding, at least 1; None keeps all.
        task: "embed" or "classify"; None is the one that the model is made for.

    Raises:
        ValidationError: a value is of the wrong type or out of range; `param` names it.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.use_activation, bool | None):
            raise ValidationError(
                f"use_activation must be true or false, got {self.use_activation!r}", param="use_activation"
            )
        is_int = isinstance(self.dimensions, int) and not isinstance(self.dimensions, bool)
        if self.dimensions is not None and (not is_int or self.dimensions < 1):
            raise ValidationError(
                f"dimensions must be an integer of at least 1, got {self.dimensions!r}", param="dimensions"
            )
        if self.task is not None and self.task not in POOLING_TASKS:
            raise ValidationError(
                f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}", param="task"
            )
