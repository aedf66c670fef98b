"""What of a model ranks share out, and among how many of them that can be done.

Invariant: these are the units that the layers state where they are made (`quire.layers.shard`); what is cut in units
that only a checkpoint's format knows, such as groups of quantised weights, is checked by the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quire.config import EngineConfig, ModelArch
from quire.config.arch import LayerShape

MOST = 64
"""Numbers of ranks up to which are tried for a model without attention."""


class Units(NamedTuple):
    """So many of something, of which each rank has equally many; or, if they are fewer, some ranks the same."""

    number: int
    name: str
    are_replicated: bool = False

    def can_be_shared(self, size: int) -> bool:
        """Whether so many ranks can have them."""
        return self.number % size == 0 or (self.are_replicated and size % self.number == 0)


def uneven(config: EngineConfig, size: int) -> str | None:
    """What of a model cannot be shared out among so many ranks; None: everything can."""
    for units in _units(config):
        if not units.can_be_shared(size):
            return f"{units.number} {units.name}"
    return None


def possible_sizes(config: EngineConfig) -> list[int]:
    """Numbers of ranks among which all of a model can be shared out."""
    return [size for size in range(1, (config.arch.num_heads or MOST) + 1) if uneven(config, size) is None]


def _units(config: EngineConfig) -> Iterator[Units]:
    arch, experts = config.arch, config.arch.experts
    for shape in dict.fromkeys(arch.layer_shapes) or (arch,):
        yield Units(shape.num_heads, "attention heads")
        yield Units(shape.num_kv_heads, "key-value heads", are_replicated=True)
        has_mlp = not isinstance(shape, LayerShape) or shape.block is None
        if has_mlp and any(arch.mlp_of(layer) != "sparse" for layer in range(arch.num_layers)):
            yield Units(shape.intermediate_size, "features of its MLPs")
    if "differential_attention" in arch.layer_types:
        yield Units(arch.num_heads // 2, "pairs of attention heads")
        yield Units(arch.num_kv_heads // 2, "pairs of key-value heads", are_replicated=True)
    if "mixture_of_attention" in arch.layer_types:
        yield Units(arch.num_kv_heads, "heads of each of its attention's experts")
    if arch.alternating is not None:
        yield Units(arch.alternating.token_size, "features of what a layer is told of a token")
    if experts is not None and not config.parallel.enable_expert_parallel:
        yield Units(experts.intermediate_size, "features of each of its experts")
    if experts is not None and experts.shared_size:
        yield Units(experts.shared_size, "features of its shared experts")
    yield from _with_states(arch)


def _with_states(arch: ModelArch) -> Iterator[Units]:
    """Of layers that keep a state."""
    if arch.mamba is not None:
        yield Units(arch.mamba.channels, "channels with a state")
    if arch.mamba2 is not None:
        yield Units(arch.mamba2.heads, "heads with a state")
        yield Units(arch.mamba2.groups, "groups of heads with a state", are_replicated=True)
    if arch.headed_mamba is not None:
        yield Units(arch.headed_mamba.heads, "heads with a state")
    if arch.delta is not None:
        yield Units(arch.delta.key_heads, "key heads with a state")
        yield Units(arch.delta.value_heads, "value heads with a state")
    if arch.recurrent_unit is not None:
        yield Units(arch.recurrent_unit.heads, "blocks of channels with a state")
    if arch.rwkv7 is not None:
        yield Units(arch.hidden_size // arch.rwkv7.head_dim, "heads with a state")
    if arch.short_conv is not None:
        yield Units(arch.hidden_size, "channels of its convolutions")
