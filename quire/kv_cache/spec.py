# SPDX-License-Identifier: Apache-2.0
"""KV cache specs of layers, and their serialization.

Invariant: plain frozen data. Layers declare specs, the core groups them (`quire.kv_cache.grouping`), the worker
allocates by them; nothing is inferred from a layer's name. Every layer is in exactly one group, and the layers of a
group are of one kind. Decoding a spec restores its class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import msgspec

from quire.errors import ConfigError

NULL_BLOCK_ID = 0  # Stands in a block table where a sequence has no block; never given out.


@dataclass(frozen=True)
class KVCacheSpec:
    """Cache needs of one layer; `block_size` is in tokens."""

    block_size: int
    kernel_blocks: int = field(default=1, kw_only=True)
    """Consecutive equal parts of a block that the layer's kernels treat as blocks: see `grown`."""

    planes: ClassVar[int] = 1
    """Consecutive equal parts of a kernel block, each a tensor of its own to the kernels."""
    rolls_back: ClassVar[bool] = True
    """True if each token has a slot of its own, so that rejected drafts can be discarded."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        raise NotImplementedError

    @property
    def kernel_block_size(self) -> int:
        """Tokens per block as the layer's kernels see it."""
        return self.block_size // self.kernel_blocks

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane of a kernel's block."""
        return self.block_bytes // (self.planes * self.kernel_blocks)

    def grown(self, factor: int) -> Self:
        """Return the spec with `factor` times the tokens per block; the layer's kernels see no difference."""
        return replace(self, block_size=self.block_size * factor, kernel_blocks=self.kernel_blocks * factor)

    @property
    def kind(self) -> Hashable:
        """Grouping key: layers of one kind need the same blocks of a sequence and may share a block table."""
        return (type(self),)

    def first_block(self, position: int) -> int:
        """Return the index of the first block that the token at `position`, or any later one, still reads."""
        raise NotImplementedError

    def needs_block(self, index: int, num_computed_tokens: int, num_blocks: int) -> bool:
        """Return whether entry `index` of a table of `num_blocks` entries must have a block; else it may be null.

        The table's request is to be computed from `num_computed_tokens` on.
        """
        return index >= self.first_block(num_computed_tokens)

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Return the most blocks a sequence of `num_tokens` holds, if no step computes more than `max_chunk` tokens.

        Blocks for drafts may temporarily be added, but only where they are free.
        """
        raise NotImplementedError

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of entries in the block table of a sequence of `num_tokens`."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    """Per-token vectors: planes * kv heads * (head size * dtype bytes + scale bytes) for each token.

    The planes are keys and values. Latent attention keeps one vector for both and so has one plane.
    """

    planes: ClassVar[int] = 2

    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    # Bytes of each quantized vector's scale, stored in the block.
    scale_bytes: int = field(default=0, kw_only=True)

    @property
    def block_bytes(self) -> int:
        vector_bytes = self.head_size * self.dtype_bytes + self.scale_bytes
        return self.planes * self.block_size * self.num_kv_heads * vector_bytes


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Full attention: every token is read by all later ones."""

    def first_block(self, position: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return self.num_blocks(num_tokens)


@dataclass(frozen=True)
class LatentAttentionSpec(FullAttentionSpec):
    """Latent attention (MLA): one vector per token for all heads; it is the key and, without its last dimensions, the
    value.
    """

    planes: ClassVar[int] = 1


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Sliding window: a token reads itself and the `sliding_window` - 1 tokens before it."""

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
    """Chunked local attention (Llama 4): each token reads only its own chunk of `attention_chunk` tokens."""

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
    """Recurrent state of fixed size (Mamba) that each token reads and replaces.

    Entry i of the block table stands for the state after the first (i + 1) * block_size tokens, or after all tokens if
    there are fewer. A step over tokens [c, e) reads entry (c - 1) // block_size (none if c is 0), and leaves a state
    in each of the entries c // block_size to (e - 1) // block_size that is not the null block. Only the last of these,
    and every `checkpoint_blocks`-th of the sequence, from which others may resume, has a block. Drafts do not count as
    tokens here: their state would replace the one to roll back to.
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
        """Return the grown spec: the state size is constant, and checkpoints stay about as frequent in tokens."""
        checkpoint_blocks = max(self.checkpoint_blocks // factor, 1)
        return replace(self, block_size=self.block_size * factor, checkpoint_blocks=checkpoint_blocks)

    def first_block(self, position: int) -> int:
        return max(position - 1, 0) // self.block_size

    def has_block(self, index: int, num_blocks: int) -> bool:
        """Return whether entry `index` of a table that is grown to `num_blocks` entries gets a block."""
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
    """No cache: one step computes the whole text with bidirectional attention, and no entry has a block.

    One table entry covers the longest possible text.
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
    """Return the most blocks that `span` consecutive tokens can touch."""
    return (span + block_size - 2) // block_size + 1


def fit_states(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Enlarge blocks so that the largest recurrent state fits; specs without states are returned unchanged.

    A state often has the size of the keys and values of hundreds of tokens. The tokens per block are multiplied until
    the largest state fits, and states are padded to a block. The waste is less than one original block of keys and
    values.
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
    """Cost of preemption on this machine: copying blocks versus recomputing tokens."""

    copied_bytes_per_s: float = 4e9
    computed_tokens_per_s: float = 1e3


@dataclass(frozen=True)
class KVCacheConfig:
    """KV cache of one worker: block 0 is the null block and is never given out.

    All groups draw on one pool of block ids and share the memory: layer j of every group lies in tensor j. At any time
    a block id belongs to one group. If groups need unequal bytes, a block is their least common multiple, and a
    smaller group uses the first bytes of it; `fit_states` has padded states accordingly. Kernels see planes of blocks:
    block i of the pool is plane n * i of a layer, where n planes fit into a block; the layers of a group agree on n.
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
        """True if accepted drafts count as computed; else they are computed again like other tokens."""
        return all(group.spec.rolls_back for group in self.groups)

    @property
    def bytes(self) -> int:
        return self.num_blocks * sum(self.tensor_block_bytes)

    def parts_per_block(self, group: KVCacheGroup) -> int:
        """Return how many planes of a group's layers fit into one block of the pool; all but the first block's stay
        unused.

        It is 1 if nothing is kept, or if no layer of the group is here.
        """
        plane_bytes = self.layer_specs[group.layer_names[0]].plane_bytes if group.layer_names else 0
        return self.tensor_block_bytes[0] // plane_bytes if plane_bytes else 1

    def of_layers(self, names: Collection[str]) -> KVCacheConfig:
        """Return the cache of some of the layers, with all groups, so that the same plans apply."""
        return replace(
            self,
            groups=of_layers(self.groups, names),
            layer_specs={name: spec for name, spec in self.layer_specs.items() if name in names},
        )


def of_layers(groups: tuple[KVCacheGroup, ...], names: Collection[str]) -> tuple[KVCacheGroup, ...]:
    """Return the groups restricted to these layers; some may become empty."""
    return tuple(
        replace(group, layer_names=tuple(name for name in group.layer_names if name in names))
        for group in groups
    )


def tensor_block_bytes(groups: tuple[KVCacheGroup, ...], specs: Mapping[str, KVCacheSpec]) -> tuple[int, ...]:
    """Return the bytes of a block in each of the shared tensors; their sum is the cost of a block id."""
    if len(groups) == 1:
        return tuple(specs[name].block_bytes for name in groups[0].layer_names)
    common = math.lcm(*(specs[name].block_bytes for group in groups for name in group.layer_names))
    return (common,) * max(len(group.layer_names) for group in groups)


@dataclass(frozen=True)
class KVMemory:
    """Memory available for the cache, and swap costs.

    `free_bytes` is available, with the `reason` for logs; `default_bytes`, if any, is the most to take by default.
    With pipeline stages this holds for each stage; `stages` names their layers.
    """

    free_bytes: int
    reason: str
    default_bytes: int | None = None
    swap_costs: SwapCosts = SwapCosts()
    stages: tuple[tuple[str, ...], ...] = ()


Groups = tuple[KVCacheGroup, ...]


NamedSpec = tuple[str, dict[str, Any]]

SPECS: dict[str, type[KVCacheSpec]] = {
    spec.__name__: spec
    for spec in (
        FullAttentionSpec,
        LatentAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalSpec,
        RecurrentStateSpec,
        EncoderOnlySpec,
    )
}


def encode_specs(specs: Mapping[str, KVCacheSpec]) -> dict[str, NamedSpec]:
    """Return layer name -> its spec as plain data."""
    return {name: _encode_spec(spec) for name, spec in specs.items()}


def decode_specs(plain: Mapping[str, NamedSpec]) -> dict[str, KVCacheSpec]:
    """Decode the output of `encode_specs`; raises KeyError or msgspec.ValidationError for an unknown spec."""
    return {name: _decode_spec(spec) for name, spec in plain.items()}


def encode_kv_config(kv_config: KVCacheConfig) -> dict[str, Any]:
    """Return a cache config as plain data, each spec with its class name."""
    plain: dict[str, Any] = msgspec.to_builtins(dataclasses.replace(kv_config, groups=(), layer_specs={}))
    plain["groups"] = [(group.layer_names, _encode_spec(group.spec)) for group in kv_config.groups]
    plain["layer_specs"] = encode_specs(kv_config.layer_specs)
    return plain


def decode_kv_config(plain: Mapping[str, Any]) -> KVCacheConfig:
    """Decode the output of `encode_kv_config`.

    Raises:
        ConfigError: there is no such cache.
    """
    try:
        base = msgspec.convert({**plain, "groups": [], "layer_specs": {}}, KVCacheConfig)
        groups = tuple(KVCacheGroup(tuple(names), _decode_spec(spec)) for names, spec in plain["groups"])
        layer_specs = decode_specs(plain["layer_specs"])
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise ConfigError(f"the recorded KV cache is unknown: {error!r}") from None
    return dataclasses.replace(base, groups=groups, layer_specs=layer_specs)


def _encode_spec(spec: KVCacheSpec) -> NamedSpec:
    return type(spec).__name__, msgspec.to_builtins(spec)


def _decode_spec(named: NamedSpec) -> KVCacheSpec:
    name, fields = named
    return msgspec.convert(fields, SPECS[name])
