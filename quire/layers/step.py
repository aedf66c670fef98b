"""What a step hands to every layer beside the rows themselves.

Shapes: T tokens of the step.
Invariant: made once for a step, by the runner, and only read by layers; a layer learns of its step in no other way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata

Kind = TypeVar("Kind", bound=GroupMetadata)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Whose the rows are. A field that is None is of a feature that the step does not use."""

    groups: tuple[GroupMetadata, ...]
    """One for each KV cache group, of the group's kind. They differ in block tables, and each layer reads its own."""
    adapter_rows: Tensor | None = None
    """[T] int32: the adapter of each token's row, an index into those that are loaded; negative = none."""
    token_types: Tensor | None = None
    """[T] int64: the kind of each token, where a model knows several; None: all are of the first."""
    intermediate: Mapping[str, Tensor] | None = None
    """What the pipeline stage before hands over, by name; each has a row for each token."""
    wanted: Tensor | None = None
    """[N] int64: the rows whose hidden states are read, perhaps none; a model may leave the others 0. None: all."""

    def metadata(self, group_id: int, kind: type[Kind]) -> Kind:
        """That of a layer's group, which is of the kind that the layer reads."""
        own = self.groups[group_id]
        assert isinstance(own, kind), f"group {group_id} has {type(own).__name__}, not {kind.__name__}"
        return own
