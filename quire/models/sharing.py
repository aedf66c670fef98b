"""Which modules compute together with those of other ranks.

Invariant: a model is shared out as a whole or not at all. A module that nobody has looked at with several ranks in mind
is refused by its type, and a subclass of one that is fine is another one.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from torch import nn

from quire.errors import ConfigError
from quire.layers.altup import AltUp, Scale
from quire.layers.attention import Attention
from quire.layers.base import Module
from quire.layers.bidirectional_attention import BidirectionalAttention, RelativeBias
from quire.layers.causal_conv import CausalConv
from quire.layers.differential_attention import DifferentialAttention, Lambda
from quire.layers.embedding import (
    PositionEmbedding,
    SinusoidalEmbedding,
    TokenTypeEmbedding,
    VocabEmbedding,
)
from quire.layers.experts import EXPERTS, LinearInStack
from quire.layers.gated_delta_net import DeltaRule, GatedDeltaNet
from quire.layers.gaussian_top import GaussianTop
from quire.layers.head_norm import HeadRMSNorm
from quire.layers.headed_mamba import HeadedMambaMixer
from quire.layers.kimi_delta_attention import KimiDeltaAttention
from quire.layers.latent_attention import LatentAttention
from quire.layers.latent_self_attention import LatentSelfAttention
from quire.layers.lightning_attention import LightningAttention, LightningScan
from quire.layers.linear import ExactLinear, GateUpLinear, Linear, QKVLinear
from quire.layers.mamba import MambaMixer, SelectiveScan, UnitRMSNorm
from quire.layers.mamba2 import HeadScan, Mamba2Mixer
from quire.layers.mixture_of_attention import MixtureOfAttention
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.per_head import PerHeadLinear
from quire.layers.pooling_head import HeadLinear, PoolingHead, TableLinear
from quire.layers.qk_norm import EachHeadLayerNorm
from quire.layers.recurrent_unit import RGLRU, RecurrentUnit
from quire.layers.rotary import RotaryEmbedding, Unrotated
from quire.layers.rotated_lightning import RotatedLightningAttention
from quire.layers.router import Router
from quire.layers.rwkv7 import ChannelMix, Rows, TimeMix, TokenShift
from quire.layers.self_attention import SelfAttention
from quire.layers.shard import Shard
from quire.layers.shared_attention import SharedKVAttention
from quire.layers.shared_block import Adapters, SharedAttention, SharedBlock, SharedMLP
from quire.layers.shared_norm import SharedRMSNorm
from quire.layers.short_conv import ShortConv
from quire.layers.sinks import Sinks
from quire.layers.sparse_mlp import SparseMLP
from quire.layers.states import StateCache
from quire.layers.temperature import TemperatureTuning
from quire.layers.two_mixers import TwoMixers
from quire.layers.vectors import OutBias
from quire.layers.xielu import XIELU
from quire.models.blocks import BLOCKS
from quire.models.decoder import Decoder, DecoderForCausalLM
from quire.models.encoder import ClassifierHead, Encoder, EncoderModel
from quire.models.gemma3n import Gemma3nBlock, Gemma3nDecoder, Gemma3nForCausalLM, Laurel, TokenRows
from quire.models.opt import NoProjection, OPTDecoder, OPTDecoderLayer, OPTForCausalLM, OPTModel
from quire.models.pooling.model import PoolingModel
from quire.models.rwkv7 import RWKV7Decoder, RWKV7ForCausalLM, RWKV7Layer
from quire.models.zamba2 import HybridLayer, MambaLayer, Zamba2Decoder, Zamba2ForCausalLM

_MATRICES = frozenset(
    {VocabEmbedding, Linear, ExactLinear, QKVLinear, GateUpLinear, LinearInStack, Router, GaussianTop}
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
        HeadedMambaMixer,
        TwoMixers,
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
_GEMMA3N = frozenset({Gemma3nForCausalLM, Gemma3nDecoder, Gemma3nBlock, TokenRows, Laurel})
_ZAMBA2 = frozenset(
    {
        Zamba2ForCausalLM,
        Zamba2Decoder,
        MambaLayer,
        HybridLayer,
        SharedBlock,
        SharedAttention,
        SharedMLP,
        Adapters,
    }
)
_RWKV7 = frozenset({RWKV7ForCausalLM, RWKV7Decoder, RWKV7Layer, TimeMix, ChannelMix, TokenShift, Rows})
_ENCODERS = frozenset({EncoderModel, Encoder, ClassifierHead})
_POOLED = frozenset({PoolingModel, PoolingHead, HeadLinear, TableLinear})
"""Heads are small: each rank has all of them."""
_OF_SUCH_PARTS = (
    _OPT
    | _GEMMA3N
    | _ZAMBA2
    | _RWKV7
    | _ENCODERS
    | _POOLED
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
"""Those whose sums can be formed of slices."""
SHARED = SLICED | EXPERTS | {SparseMLP}
"""With experts, whose sums no number of ranks changes where they are shared out whole."""


@runtime_checkable
class HasPlan(Protocol):
    """A model of modules that nobody here knows, with a plan of their own by which ranks share them."""

    def check_plan(self, option: str) -> None:
        """Raise ConfigError, with `option`, if the plan cannot be followed."""


def check_ranks(model: nn.Module, option: str) -> None:
    """Whether several ranks can share a model, as `option` asks for; raises as `check_shared` does."""
    if isinstance(model, HasPlan):
        model.check_plan(option)
    else:
        check_shared(model, option)


def check_shared(model: nn.Module, option: str, modules: Collection[type[nn.Module]] = SHARED) -> None:
    """Whether all modules of a model can be shared out, as `option` asks for.

    Raises:
        ConfigError: one cannot; the message names it.
    """
    for path, module in model.named_modules():
        if type(module) not in modules:
            raise ConfigError(
                f"{option}: {path or 'the model'} ({type(module).__name__}) cannot be shared out among ranks yet"
            )


def take_shares(model: nn.Module, shard: Shard) -> None:
    """Have modules without weights compute for one rank."""
    for module in model.modules():
        if isinstance(module, Module):
            module.take_share(shard)
