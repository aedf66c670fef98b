# SPDX-License-Identifier: Apache-2.0
"""Per-step metadata that every layer receives with the rows.

Shapes: T tokens of the step.
Invariant: the runner creates it once per step, layers only read it, and a layer gets step metadata in no other way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from quire.kernels.attention_metadata import GroupMetadata

Kind = TypeVar("Kind", bound=GroupMetadata)


class MediaRows(NamedTuple):
    """Rows of a step that take embeddings of images and other media in place of token embeddings: M of the T rows."""

    rows: Tensor
    """[M] int64, ascending."""
    values: Tensor
    """[M, H] of the embeddings' dtype."""
    deepstack: tuple[Tensor, ...] = ()
    """[M, H] each: added to the stream behind the first layers, one for each of these."""


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
    media: MediaRows | None = None
    """Embeddings of media, if rows of the step take some."""
    rope_positions: Tensor | None = None
    """[3, T] int64: frame, row and column by which each row is rotated. None: `positions` count for all three."""
    encoded_lens: Tensor | None = None
    """[R] int32: rows of the encoder's output of each request, for cross-attention. None: the model has no encoder, or
    nothing is encoded."""
    encoded_rows: Tensor | None = None
    """[T] int64: request of each row, if all rows are tokens behind encoders' outputs of any length; else None."""

    def metadata(self, group_id: int, kind: type[Kind]) -> Kind:
        """Return the metadata of a group, which must be of the given kind."""
        own = self.groups[group_id]
        assert isinstance(own, kind), f"group {group_id} has {type(own).__name__}, not {kind.__name__}"
        return own
