"""What the oracles of layers with a state share: where a request's tokens start from, and where they leave a state.

Invariant: this and `csrc/cpu/states.h` are the only readers of a table of states; `RecurrentStateSpec` says what stands
in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from quire.kernels.attention_metadata import StateMetadata


class StatePiece(NamedTuple):
    """Rows [first, last) of a step, all of one request: from the state in one block to that in another.

    Pieces of a request come one behind the other, and each starts from what the one before has left.
    """

    first: int
    last: int
    source: int
    """Block of the state before the first row; 0: the request starts here, from zeros."""
    target: int
    """Block of the state behind the last row; it may be the source. 0: none, for the rows are drafts."""


def state_pieces(metadata: StateMetadata, num_blocks: int) -> Iterator[StatePiece]:
    """The pieces of a step, request by request; rows of no request, and of requests of length 0, are in none.

    Raises:
        IndexError: a state is read or left where the cache of `num_blocks` has no place for it.
    """
    parts = (metadata.query_start_loc, metadata.seq_lens, metadata.kept, metadata.block_tables)
    bounds, ends, kept, tables = (part.tolist() for part in parts)
    for first, last, end, num_kept, table in zip(bounds[:-1], bounds[1:], ends, kept, tables, strict=True):
        if first < last and end > 0:
            behind = last - (end - num_kept)
            if not first < behind <= last:
                raise IndexError(
                    f"rows [{first}, {last}) of {end} tokens cannot leave a state behind {num_kept}"
                )
            pieces = [*_pieces(first, behind, num_kept, table, metadata.block_size, num_blocks)]
            yield from pieces
            if behind < last:
                yield StatePiece(behind, last, pieces[-1].target, 0)


def _pieces(
    first: int, last: int, end: int, table: list[int], block_size: int, num_blocks: int
) -> Iterator[StatePiece]:
    start, source, offset = end - (last - first), 0, last - end
    if start > 0:
        source = _checked(table[(start - 1) // block_size], num_blocks)
    for index in range(start // block_size, (end - 1) // block_size + 1):
        behind = min((index + 1) * block_size, end)
        if table[index] or behind == end:
            target = _checked(table[index], num_blocks)
            yield StatePiece(first, behind + offset, source, target)
            first, source = behind + offset, target


def _checked(block: int, num_blocks: int) -> int:
    if not 0 < block < num_blocks:
        raise IndexError(f"block {block} is no place for a state in a cache of {num_blocks} blocks")
    return block


def state_before(states: Tensor, piece: StatePiece) -> Tensor:
    """A copy of the state, of `states` [blocks, ...], from which a piece starts."""
    source = states[piece.source]
    return source.clone() if piece.source else source.new_zeros(source.shape)


def leave_state(states: Tensor, piece: StatePiece, state: Tensor) -> None:
    """Put the state behind a piece where it is to be, in `states` [blocks, ...], if anywhere."""
    if piece.target:
        states[piece.target] = state
