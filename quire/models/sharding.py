# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: which modules support it, and the application of a rank's shard to a model.

Invariant: a model is sharded as a whole or not at all. A module is supported by its exact type only; a subclass must be
listed itself.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from torch import nn

from quire.errors import ConfigError
from quire.layers.activation import XIELU
from quire.layers.altup import AltUp, GaussianTop, Scale
from quire.layers.attention import Attention
from quire.layers.attention_parts import Sinks, TemperatureTuning
from quire.layers.attention_variants import (
    DifferentialAttention,
    Lambda,
    MixtureOfAttention,
    ParallelAttentionMamba,
    SharedKVAttention,
)
from quire.layers.base import Module
from quire.layers.bidirectional_attention import BidirectionalAttention
from quire.layers.embedding import PositionEmbedding, SinusoidalEmbedding, TokenTypeEmbedding, VocabEmbedding
from quire.layers.experts import EXPERTS, ExpertRouter, LinearInStack, SparseMLP
from quire.layers.gated_delta_net import DeltaRule, GatedDeltaNet, KimiDeltaAttention
from quire.layers.head_norms import EachHeadLayerNorm, HeadRMSNorm, SharedRMSNorm
from quire.layers.latent_attention import LatentAttention, LatentSelfAttention
from quire.layers.lightning_attention import LightningAttention, LightningScan, RotatedLightningAttention
from quire.layers.linear import ExactLinear, GateUpLinear, Linear, QKVLinear
from quire.layers.mamba import (
    RGLRU,
    CausalConv,
    HeadScan,
    Mamba2Mixer,
    MambaMixer,
    PLaMo2Mamba,
    RecurrentUnit,
    SelectiveScan,
    ShortConv,
    UnitRMSNorm,
)
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.per_head_linear import PerHeadLinear
from quire.layers.relative_bias import RelativeBias
from quire.layers.rotary import RotaryEmbedding, Unrotated
from quire.layers.rwkv7 import ChannelMix, TimeMix, TokenShift, VectorRows
from quire.layers.self_attention import SelfAttention
from quire.layers.shard import Shard
from quire.layers.shared_block import SharedAttention, SharedBlock, SharedMLP, TurnAdapters
from quire.layers.states import StateCache
from quire.layers.vectors import OutBias
from quire.models.block_kinds import BLOCKS
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.models.encoder import ClassifierHead, EncoderModel, EncoderStack
from quire.models.gemma3n import Gemma3nBlock, Gemma3nDecoder, Gemma3nForCausalLM, Laurel, TokenTable
from quire.models.gemma4 import (
    ExpertsBesideMLP,
    Gemma4Block,
    Gemma4Decoder,
    Gemma4ForCausalLM,
    Multipliers,
    ScaledRouter,
)
from quire.models.gemma_parts import PerLayerEmbedding, TokenRowGate
from quire.models.opt import NoProjection, OPTDecoder, OPTDecoderLayer, OPTForCausalLM, OPTModel
from quire.models.rwkv7 import RWKV7Decoder, RWKV7ForCausalLM, RWKV7Layer
from quire.models.zamba2 import HybridLayer, MambaLayer, Zamba2Decoder, Zamba2ForCausalLM

_MATRICES = frozenset(
    {VocabEmbedding, Linear, ExactLinear, QKVLinear, GateUpLinear, LinearInStack, ExpertRouter, GaussianTop}
)
_BY_HEADS = frozenset(
    {
        Attention,
        BidirectionalAttention,
        DifferentialAttention,
        MixtureOfAttention,
        SharedKVAttention,
        RelativeBias,
        Sinks,
        HeadRMSNorm,
        EachHeadLayerNorm,
        SharedRMSNorm,
    }
)
_ON_WHOLE_ROWS_OR_HEADS = frozenset(
    {
        LayerNorm,
        RMSNorm,
        RotaryEmbedding,
        Unrotated,
        PositionEmbedding,
        SinusoidalEmbedding,
        TemperatureTuning,
        TokenTypeEmbedding,
        XIELU,
        Lambda,
        OutBias,
        AltUp,
        Scale,
    }
)
_WITH_STATES = frozenset(
    {
        StateCache,
        CausalConv,
        MambaMixer,
        SelectiveScan,
        UnitRMSNorm,
        Mamba2Mixer,
        HeadScan,
        PLaMo2Mamba,
        ParallelAttentionMamba,
        ShortConv,
        GatedDeltaNet,
        DeltaRule,
        KimiDeltaAttention,
        LightningAttention,
        LightningScan,
        RotatedLightningAttention,
        RecurrentUnit,
        RGLRU,
    }
)
_LATENT = frozenset({LatentSelfAttention, LatentAttention, PerHeadLinear})
_OPT = frozenset({OPTForCausalLM, OPTModel, OPTDecoder, OPTDecoderLayer, NoProjection, nn.Identity})
_GEMMA3N = frozenset({Gemma3nForCausalLM, Gemma3nDecoder, Gemma3nBlock, Laurel, TokenTable})
_GEMMA4 = frozenset({Gemma4ForCausalLM, Gemma4Decoder, Gemma4Block, Multipliers})
_GEMMAS = _GEMMA3N | _GEMMA4 | {PerLayerEmbedding, TokenRowGate}
_ZAMBA2 = frozenset(
    {
        Zamba2ForCausalLM,
        Zamba2Decoder,
        MambaLayer,
        HybridLayer,
        SharedBlock,
        SharedAttention,
        SharedMLP,
        TurnAdapters,
    }
)
_RWKV7 = frozenset({RWKV7ForCausalLM, RWKV7Decoder, RWKV7Layer, TimeMix, ChannelMix, TokenShift, VectorRows})
_ENCODERS = frozenset({EncoderModel, EncoderStack, ClassifierHead})
_OF_SUCH_PARTS = (
    _OPT
    | _GEMMAS
    | _ZAMBA2
    | _RWKV7
    | _ENCODERS
    | {nn.ModuleList, nn.ModuleDict, DecoderForCausalLM, Decoder, SelfAttention, GatedMLP, PlainMLP}
)
SLICED: frozenset[type[nn.Module]] = (
    _MATRICES
    | _BY_HEADS
    | _ON_WHOLE_ROWS_OR_HEADS
    | _WITH_STATES
    | _LATENT
    | _OF_SUCH_PARTS
    | frozenset(BLOCKS.values())
)
"""Modules that support --tp-invariant."""
SHARED = SLICED | EXPERTS | {SparseMLP, ExpertsBesideMLP, ScaledRouter}
"""`SLICED` with experts, whose sums are the same at any number of ranks if whole experts are distributed."""


@runtime_checkable
class HasPlan(Protocol):
    """Model with its own sharding plan (transformers backend)."""

    def check_plan(self, option: str) -> None:
        """Raise ConfigError, naming `option`, if the plan cannot be followed."""


def check_ranks(model: nn.Module, option: str) -> None:
    """Check that several ranks can share the model; raises as `check_shared` does."""
    if isinstance(model, HasPlan):
        model.check_plan(option)
    else:
        check_shared(model, option)


def check_shared(model: nn.Module, option: str, modules: Collection[type[nn.Module]] = SHARED) -> None:
    """Check that all modules of a model support tensor parallelism, as `option` requests.

    Raises:
        ConfigError: one does not; the message names it.
    """
    for path, module in model.named_modules():
        if type(module) not in modules and not getattr(module, "is_replicated", False):
            raise ConfigError(
                f"{option}: {path or 'the model'} ({type(module).__name__}) does not support tensor parallelism yet"
            )


def apply_shards(model: nn.Module, shard: Shard) -> None:
    """Apply a rank's shard to modules without weights."""
    for module in model.modules():
        if isinstance(module, Module):
            module.apply_shard(shard)
