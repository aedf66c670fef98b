"""What a layer needs of the KV cache, and how layers share blocks.

Invariant: plain frozen data. Layers declare specs, the core groups them, the worker allocates by them; nothing
is inferred from a layer's name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

NULL_BLOCK_ID = 0
"""Stands in a block table where a sequence has no block; it is never given out."""


@dataclass(frozen=True)
class KVCacheSpec:
    """Cache needs of one layer; `block_size` is in tokens."""

    block_size: int
    kernel_blocks: int = field(default=1, kw_only=True)
    """Equal parts of a block, one behind the other, that are blocks to the layer's kernels: see `grown`."""

    planes: ClassVar[int] = 1
    """Equal parts of a kernel's block, one behind the other, each of which is a tensor of its own to the kernels."""
    rolls_back: ClassVar[bool] = True
    """Whether each token has a place of its own, so that it may be computed, found wrong and left behind."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def kernel_block_size(self) -> int:
        """Tokens of what the layer's kernels know as a block."""
        return self.block_size // self.kernel_blocks

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane of a kernel's block."""
        return self.block_bytes // (self.planes * self.kernel_blocks)

    def grown(self, factor: int) -> Self:
        """The same with blocks of so many times the tokens; the layer's kernels see no difference."""
        return replace(self, block_size=self.block_size * factor, kernel_blocks=self.kernel_blocks * factor)

    @property
    def kind(self) -> Hashable:
        """Layers of one kind need the same blocks of a sequence, and may share a block table."""
        return (type(self),)

    def first_block(self, position: int) -> int:
        """Index of the first block that the token at `position`, or any later one, still reads."""
        raise NotImplementedError

    def needs_block(self, index: int, num_computed_tokens: int, num_blocks: int) -> bool:
        """Whether entry `index` of a table of `num_blocks` entries must have a block; else it may be null.

        The table's request is to be computed from `num_computed_tokens` on.
        """
        return index >= self.first_block(num_computed_tokens)

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, if no step computes more than `max_chunk` tokens.

        Blocks for drafts may come on top of them for a while, and are only taken where they are free.
        """
        raise NotImplementedError

    def num_blocks(self, num_tokens: int) -> int:
        """Entries in the block table of a sequence of `num_tokens`."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Vectors of tokens: planes * kv heads * (head size * dtype bytes + scale bytes) for each.

    The planes are keys and values. A kind that keeps one vector for both, as latent attention does, has one plane.
    """

    planes: ClassVar[int] = 2

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    scale_bytes: int = field(default=0, kw_only=True)
    """Bytes of each quantized vector's scale, which stands in the block too."""

    @property
    def block_bytes(self) -> int:
        vector_bytes = self.head_size * self.dtype_bytes + self.scale_bytes
        return self.planes * self.block_size * self.num_kv_heads * vector_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is read by all later ones."""

    def first_block(self, position: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return self.num_blocks(num_tokens)


@dataclass(frozen=True)
class LatentAttentionSpec(FullAttentionSpec):
    """One vector of a token for all heads, which is its key and, but for its last dimensions, its value (as in MLA)."""

    planes: ClassVar[int] = 1


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A token reads itself and the `sliding_window` - 1 tokens before it."""

    sliding_window: int

    @property
    def kind(self) -> Hashable:
        return type(self), self.sliding_window

    def first_block(self, position: int) -> int:
        return max(position - self.sliding_window + 1, 0) // self.block_size

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        span = self.sliding_window - 1 + max_chunk
        return min(self.num_blocks(num_tokens), _max_blocks_touched(span, self.block_size))


@dataclass(frozen=True)
class ChunkedLocalSpec(AttentionSpec):
    """Tokens are cut into chunks of `attention_chunk`, and each reads its own chunk only (as in Llama 4)."""

    attention_chunk: int

    @property
    def kind(self) -> Hashable:
        return type(self), self.attention_chunk

    def first_block(self, position: int) -> int:
        return position // self.attention_chunk * self.attention_chunk // self.block_size

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        span = self.attention_chunk - 1 + max_chunk
        return min(self.num_blocks(num_tokens), _max_blocks_touched(span, self.block_size))


@dataclass(frozen=True)
class RecurrentStateSpec(KVCacheSpec):
    """A state of fixed size that each token reads and replaces (as in Mamba), in place of keys and values.

    Entry i of the block table stands for the state after the first (i + 1) * block_size tokens, or after all
    tokens if there are fewer. A step over tokens [c, e) reads entry (c - 1) // block_size (none if c is 0), and
    leaves a state in each of the entries c // block_size to (e - 1) // block_size that is not the null block.
    Of those the last, and every `checkpoint_blocks`-th of the sequence, from which others may resume, has a block.
    Drafts are none of these tokens: the state behind them would replace the one to go back to.
    """

    rolls_back: ClassVar[bool] = False

    state_bytes: int
    checkpoint_blocks: int = 1

    @property
    def block_bytes(self) -> int:
        return self.state_bytes

    @property
    def kind(self) -> Hashable:
        return type(self), self.checkpoint_blocks

    def grown(self, factor: int) -> Self:
        """A state takes no more for standing for more tokens, and is kept for others about as often as before."""
        checkpoint_blocks = max(self.checkpoint_blocks // factor, 1)
        return replace(self, block_size=self.block_size * factor, checkpoint_blocks=checkpoint_blocks)

    def first_block(self, position: int) -> int:
        return max(position - 1, 0) // self.block_size

    def has_block(self, index: int, num_blocks: int) -> bool:
        """Whether entry `index` of a table that is grown to `num_blocks` entries gets a block."""
        return index == num_blocks - 1 or (index + 1) % self.checkpoint_blocks == 0

    def needs_block(self, index: int, num_computed_tokens: int, num_blocks: int) -> bool:
        first = self.first_block(num_computed_tokens)
        is_read = index == first and num_computed_tokens > 0
        return is_read or (index >= first and self.has_block(index, num_blocks))

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        checkpoints = -(-_max_blocks_touched(max_chunk, self.block_size) // self.checkpoint_blocks)
        read_and_written_last = 2
        return min(self.num_blocks(num_tokens), checkpoints + read_and_written_last)


@dataclass(frozen=True)
class EncoderOnlySpec(KVCacheSpec):
    """Tokens see one another in the one step that computes them all, and nothing is kept: no entry has a block.

    One entry of a table stands for as many tokens as a text may have.
    """

    rolls_back: ClassVar[bool] = False

    @property
    def block_bytes(self) -> int:
        return 0

    def first_block(self, position: int) -> int:
        return 0

    def needs_block(self, index: int, num_computed_tokens: int, num_blocks: int) -> bool:
        return False

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return 0


def _max_blocks_touched(span: int, block_size: int) -> int:
    """Blocks that `span` consecutive tokens can lie in at most."""
    return (span + block_size - 2) // block_size + 1


def fit_states(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Specs of blocks that are about as large as the states that lie in them; others' as they are.

    A state has its size whatever the number of tokens that it stands for, and often that of the keys and values of
    hundreds. So blocks get as many times the tokens as it takes for the largest state to fit, and states are rounded up
    to a block: less than the keys and values of one block as it was stay unused.
    """
    states = {name: spec for name, spec in specs.items() if isinstance(spec, RecurrentStateSpec)}
    unit = math.lcm(*(spec.block_bytes for name, spec in specs.items() if name not in states))
    if not states or len(states) == len(specs):
        return dict(specs)
    largest = max(spec.state_bytes for spec in states.values())
    factor = -(-largest // unit)
    fitted = {name: spec.grown(factor) for name, spec in specs.items()}
    for name in states:
        fitted[name] = replace(fitted[name], state_bytes=unit * factor)  # type: ignore[call-arg]
    return fitted


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers of one kind that share one block table; a block id means one block in each of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True)
class SwapCosts:
    """What a preempted request costs on this machine: to copy its blocks, or to compute its tokens again."""

    copied_bytes_per_s: float = 4e9
    computed_tokens_per_s: float = 1e3


@dataclass(frozen=True)
class KVCacheConfig:
    """The cache of one worker: block 0 is the null block and is never given out.

    All groups draw on one pool of block ids and share the memory: layer j of every group lies in tensor j. At any time
    a block id belongs to one group. Where groups need unequal bytes, a block is the least common multiple of them, and
    a group that needs less of it uses the first bytes; `fit_states` has seen to it that states need no more than that.
    To a layer, whose kernels see planes of blocks, block i of the pool is plane n * i, where n planes fit into a block;
    the layers of a group agree on n.
    The host tier has `num_host_blocks` such blocks beside its own, unused, null block.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    layer_specs: Mapping[str, KVCacheSpec]
    num_host_blocks: int = 0
    swap_costs: SwapCosts = SwapCosts()

    @property
    def block_size(self) -> int:
        """Tokens of a block, the same in all groups."""
        return self.groups[0].spec.block_size

    @property
    def tensor_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each tensor."""
        return tensor_block_bytes(self.groups, self.layer_specs)

    @property
    def rolls_back(self) -> bool:
        """Whether accepted drafts count as computed; else they are computed again, as tokens like others."""
        return all(group.spec.rolls_back for group in self.groups)

    @property
    def bytes(self) -> int:
        return self.num_blocks * sum(self.tensor_block_bytes)

    def parts_per_block(self, group: KVCacheGroup) -> int:
        """Planes of a group's layers that fit into one block of the pool; all but the first block's stay unused.

        One, where nothing is kept, or no layer of the group is here.
        """
        plane_bytes = self.layer_specs[group.layer_names[0]].plane_bytes if group.layer_names else 0
        return self.tensor_block_bytes[0] // plane_bytes if plane_bytes else 1

    def of_layers(self, names: Collection[str]) -> KVCacheConfig:
        """The cache of some of the layers, with all groups, and so for the same plans."""
        return replace(
            self,
            groups=of_layers(self.groups, names),
            layer_specs={name: spec for name, spec in self.layer_specs.items() if name in names},
        )


def of_layers(groups: tuple[KVCacheGroup, ...], names: Collection[str]) -> tuple[KVCacheGroup, ...]:
    """The groups with no other layers than these; some may be left without any."""
    return tuple(
        replace(group, layer_names=tuple(name for name in group.layer_names if name in names))
        for group in groups
    )


def tensor_block_bytes(groups: tuple[KVCacheGroup, ...], specs: Mapping[str, KVCacheSpec]) -> tuple[int, ...]:
    """Bytes that a block takes in each of the tensors that the groups share; their sum is what a block id costs."""
    if len(groups) == 1:
        return tuple(specs[name].block_bytes for name in groups[0].layer_names)
    common = math.lcm(*(specs[name].block_bytes for group in groups for name in group.layer_names))
    return (common,) * max(len(group.layer_names) for group in groups)


@dataclass(frozen=True)
class KVMemory:
    """Memory for the cache, and how it compares with computing.

    `free_bytes` can be had, for the `reason` given; `default_bytes`, if any, is the most to take unasked. With pipeline
    stages, each has so much, for those layers that `stages` names.
    """

    free_bytes: int
    reason: str
    default_bytes: int | None = None
    swap_costs: SwapCosts = SwapCosts()
    stages: tuple[tuple[str, ...], ...] = ()
