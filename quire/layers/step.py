"""Per-step metadata that every layer receives with the rows.

Shapes: T tokens of the step.
Invariant: the runner creates it once per step, layers only read it, and a layer gets step metadata in no other way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata

Kind = TypeVar("Kind", bound=GroupMetadata)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Metadata of the step's rows. A field is None if the step does not use its feature."""

    groups: tuple[GroupMetadata, ...]
    """Metadata per KV cache group, of the group's kind; each layer reads that of its own group."""
    adapter_rows: Tensor | None = None
    """[T] int32: loaded-adapter index of each token's row; negative = none."""
    token_types: Tensor | None = None
    """[T] int64: token type ids, if the model has several; None: all are of the first type."""
    intermediate: Mapping[str, Tensor] | None = None
    """Intermediate tensors of the previous pipeline stage by name, one row per token."""
    wanted: Tensor | None = None
    """[N] int64: rows whose hidden states are read, perhaps none; a model may leave the others 0. None: all."""

    def metadata(self, group_id: int, kind: type[Kind]) -> Kind:
        """Return the metadata of a group, which must be of the given kind."""
        own = self.groups[group_id]
        assert isinstance(own, kind), f"group {group_id} has {type(own).__name__}, not {kind.__name__}"
        return own
