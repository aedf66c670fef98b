# SPDX-License-Identifier: Apache-2.0
"""Grouping of layers whose caches share blocks, done once at the start."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence

from quire.errors import ConfigError
from quire.kv_cache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    Groups,
    KVCacheGroup,
    KVCacheSpec,
    tensor_block_bytes,
)

logger = logging.getLogger(__name__)

MAX_GROUPS = 8  # Each group has block tables of its own, which cost time per step and per block.


def group_layers(specs: Mapping[str, KVCacheSpec], max_model_len: int, *, hybrid: bool = True) -> Groups:
    """Group layers that share blocks so that a long request holds the fewest bytes.

    Layers of one kind make one group. Layers of several kinds make groups of equal size, each of one kind, so that any
    block can serve any group; unused parts of blocks count as held. An alternative is to treat all attention layers as
    full attention, in one group; it wins where windows are not shorter than requests. Ties go to the fewest groups.
    Groups of full attention come first: they find the end of a cached prefix soonest.

    Args:
        specs: layer name -> spec.
        max_model_len: tokens of a long request.
        hybrid: False to treat all attention layers as full attention.

    Raises:
        ConfigError: layers disagree on the block size, or cannot be treated as full attention.
    """
    sizes = {spec.block_size for spec in specs.values()}
    if len(sizes) != 1:
        raise ConfigError(f"all layers must use one KV block size, found {sorted(sizes)}")
    if len({spec.kind for spec in specs.values()}) == 1:
        return (KVCacheGroup(tuple(specs), next(iter(specs.values()))),)
    as_full = _as_full_attention(specs)
    if not hybrid and not as_full:
        raise ConfigError("--disable-hybrid-kv-cache-manager is for models with attention layers only")
    candidates = as_full + (_hybrid_groups(specs) if hybrid else [])
    chosen = min(candidates, key=lambda groups: (request_bytes(groups, specs, max_model_len), len(groups)))
    logger.info("KV cache groups: %s", _describe(chosen, specs))
    return chosen


def request_bytes(groups: Groups, specs: Mapping[str, KVCacheSpec], num_tokens: int) -> int:
    """Return the bytes that a request holds while it generates its token number `num_tokens`."""
    num_blocks = sum(group.spec.max_blocks(num_tokens, max_chunk=1) for group in groups)
    return num_blocks * sum(tensor_block_bytes(groups, specs))


def _as_full_attention(specs: Mapping[str, KVCacheSpec]) -> list[Groups]:
    """Return one group of all layers, if they can be treated as full attention."""
    is_attention = all(isinstance(spec, AttentionSpec) for spec in specs.values())
    if not is_attention or len({spec.planes for spec in specs.values()}) > 1:
        return []
    any_spec = next(iter(specs.values()))
    spec = FullAttentionSpec(
        any_spec.block_size, num_kv_heads=0, head_size=0, dtype_bytes=0, kernel_blocks=any_spec.kernel_blocks
    )
    return [(KVCacheGroup(tuple(specs), spec),)]


def _hybrid_groups(specs: Mapping[str, KVCacheSpec]) -> list[Groups]:
    """Return groupings of every size that gives at most `MAX_GROUPS` groups, or one per kind."""
    kinds: dict[Hashable, list[str]] = {}
    for name, spec in sorted(specs.items(), key=lambda item: not isinstance(item[1], FullAttentionSpec)):
        kinds.setdefault((spec.kind, spec.block_bytes), []).append(name)
    sizes = range(1, max(map(len, kinds.values())) + 1)
    candidates = [_cut(list(kinds.values()), specs, size) for size in sizes]
    return [groups for groups in candidates if len(groups) <= max(MAX_GROUPS, len(kinds))]


def _cut(kinds: Sequence[Sequence[str]], specs: Mapping[str, KVCacheSpec], size: int) -> Groups:
    """Split each kind into groups of `size` layers; the last of a kind may have fewer."""
    cuts = [tuple(names[i : i + size]) for names in kinds for i in range(0, len(names), size)]
    return tuple(KVCacheGroup(names, specs[names[0]]) for names in cuts)


def _describe(groups: Groups, specs: Mapping[str, KVCacheSpec]) -> str:
    kinds = [f"{len(group.layer_names)} {type(group.spec).__name__.removesuffix('Spec')}" for group in groups]
    total = len(groups) * sum(tensor_block_bytes(groups, specs))
    used = sum(specs[name].block_bytes for group in groups for name in group.layer_names)
    return f"{' + '.join(kinds)} layers; {1 - used / total:.1%} of their blocks is padding"
