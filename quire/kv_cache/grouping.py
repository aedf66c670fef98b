"""How the layers of a model are put into groups that share one pool of blocks.

Invariant: every layer is in exactly one group, and the layers of a group are of one kind.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence

from quire.errors import ConfigError
from quire.kv_cache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    tensor_block_bytes,
)

logger = logging.getLogger(__name__)

MAX_GROUPS = 8
"""Each group has block tables of its own, which cost a little time per step and per block."""
MAX_UNUSED = 0.5
"""Sharing blocks between kinds of layers is not worth more than this share of their bytes."""


def group_layers(specs: Mapping[str, KVCacheSpec], *, hybrid: bool = True) -> tuple[KVCacheGroup, ...]:
    """Put layers into groups of one kind and equal size, so that any block can serve any group.

    A block has room for as many layers as the largest group has. The size is chosen such that the least of this
    room stays unused (in groups that are not full, and by layers that need less than others), with at most
    `MAX_GROUPS` groups if the number of kinds allows it; of equals, the one with fewest groups. Layers of one kind
    make one group. Groups of full attention come first: they tell soonest where a cached prefix ends.

    Args:
        specs: layer name -> spec.
        hybrid: False to treat all attention layers as full attention, in one group.

    Raises:
        ConfigError: layers disagree on the block size, or cannot be treated as one kind.
    """
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1:
        raise ConfigError(f"all layers must use one KV block size, found {sorted(sizes)}")
    if len({spec.kind for spec in specs.values()}) == 1:
        return (KVCacheGroup(tuple(specs), next(iter(specs.values()))),)
    if not hybrid:
        return (_as_one_group(specs),)
    groups = _hybrid_groups(specs)
    if unused_share(groups, specs) > MAX_UNUSED and _all_attention(specs):
        logger.warning("the layers' blocks differ too much to be shared: all are kept as by full attention")
        return (_as_one_group(specs),)
    logger.info("KV cache groups: %s", _describe(groups, specs))
    return groups


def unused_share(groups: tuple[KVCacheGroup, ...], specs: Mapping[str, KVCacheSpec]) -> float:
    """Share of the bytes that stays unused if every group holds one block, 0 to 1."""
    used = sum(specs[name].block_bytes for group in groups for name in group.layer_names)
    return 1 - used / (len(groups) * sum(tensor_block_bytes(groups, specs)))


def _all_attention(specs: Mapping[str, KVCacheSpec]) -> bool:
    return all(isinstance(spec, AttentionSpec) for spec in specs.values())


def _as_one_group(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroup:
    if not _all_attention(specs):
        raise ConfigError("--disable-hybrid-kv-cache-manager is for models with attention layers only")
    block_size = next(iter(specs.values())).block_size
    return KVCacheGroup(tuple(specs), FullAttentionSpec(block_size, num_kv_heads=0, head_size=0, dtype_bytes=0))


def _hybrid_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    kinds: dict[Hashable, list[str]] = {}
    for name, spec in sorted(specs.items(), key=lambda item: not isinstance(item[1], FullAttentionSpec)):
        kinds.setdefault((spec.kind, spec.block_bytes), []).append(name)
    most = max(MAX_GROUPS, len(kinds))
    sizes = range(1, max(map(len, kinds.values())) + 1)
    candidates = [_cut(list(kinds.values()), specs, size) for size in sizes]
    return min(
        (groups for groups in candidates if len(groups) <= most),
        key=lambda groups: (unused_share(groups, specs), len(groups)),
    )


def _cut(
    kinds: Sequence[Sequence[str]], specs: Mapping[str, KVCacheSpec], size: int
) -> tuple[KVCacheGroup, ...]:
    """Groups of `size` layers; the last of a kind may have fewer."""
    cuts = [tuple(names[i : i + size]) for names in kinds for i in range(0, len(names), size)]
    return tuple(KVCacheGroup(names, specs[names[0]]) for names in cuts)


def _describe(groups: tuple[KVCacheGroup, ...], specs: Mapping[str, KVCacheSpec]) -> str:
    kinds = [f"{len(group.layer_names)} {type(group.spec).__name__.removesuffix('Spec')}" for group in groups]
    return f"{' + '.join(kinds)} layers; {unused_share(groups, specs):.1%} of their blocks is padding"
