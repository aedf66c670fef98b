# SPDX-License-Identifier: Apache-2.0
"""Table of GGUF architectures: the Hugging Face family of each, and its names.

Invariant: torch-free. A row's `config` produces exactly the config.json keys that the family's reader takes, and reads
with `GgufModel.own` every key of the architecture that it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames
from quire.models.gguf import decoders, sparse
from quire.models.gguf.decoders import BERT_PLACES, GEMMA3N_PLACES, LATENT_PLACES, bert, deepseek2, gemma3n
from quire.models.gguf.hybrids import (
    CHANNEL_PLACES,
    CONV_PLACES,
    DELTA_APART,
    DELTA_PLACES,
    DELTA_STEPS_APART,
    NEMOTRON_PLACES,
    PARALLEL_PLACES,
    STATE_PLACES,
    falcon_h1,
    granite_hybrid,
    jamba,
    lfm2,
    lfm2_moe,
    mamba,
    mamba2,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import (
    AROUND,
    EXPERTS,
    MERGED_MLP,
    MULTIPLIERS,
    SANDWICH,
    Config,
    Listed,
    TensorPlaces,
    biased,
    dense,
    multiplied,
    named,
    windows,
)


@dataclass(frozen=True)
class GgufArchitecture:
    """GGUF architecture, by its name in `general.architecture`."""

    config: Callable[[GgufModel], Config]
    """Returns the keys of config.json, except those that every file has."""
    interleaved: bool = False
    """True if rotated dimensions are stored in adjacent pairs (order of q and k in the files of some families)."""
    apart: Mapping[str, tuple[str, ...]] | None = field(default_factory=lambda: CheckpointNames().merged)
    """Our merged layers -> their separate tensors in GGUF; empty if q, k and v are merged, and gate and up.

    None: as in the family's own checkpoints.
    """
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelArch` that differ from the family's own checkpoints."""
    places: TensorPlaces = field(default_factory=dict)
    """Tensors whose place differs from `shapes.SHARED`."""
    in_turn: bool = False
    """True if value heads are stored in the order in which key heads serve them in turn (`DeltaArch`)."""
    listed: Listed = field(default_factory=dict)
    """Layer parameters that are stored in the metadata."""


def _llama(model: GgufModel) -> Config:
    """Llama, Mistral, Mixtral and models of the same shape: windows are not in the file."""
    if not model.own.integer("expert_count", 0, low=0):
        model.own.only("expert_used_count", 0)
        return dense(
            model,
            "LlamaForCausalLM",
            attention_bias=biased(model, "attn_q"),
            mlp_bias=biased(model, "ffn_up"),
        )
    experts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return dense(model, "MixtralForCausalLM", **named(model, experts))


def _qwen2(model: GgufModel) -> Config:
    return dense(model, "Qwen2ForCausalLM")


def _qwen2vl(model: GgufModel) -> Config:
    """Language model of Qwen2-VL and 2.5-VL; of text all three positions are equal."""
    model.own.get("rope.dimension_sections")
    return _qwen2(model)


def _qwen3(model: GgufModel) -> Config:
    return dense(model, "Qwen3ForCausalLM")


def _qwen2_moe(model: GgufModel) -> Config:
    keys = {
        **EXPERTS,
        "num_experts": "expert_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return dense(model, "Qwen2MoeForCausalLM", **named(model, keys), norm_topk_prob=False)


def _qwen3_moe(model: GgufModel) -> Config:
    keys = {**EXPERTS, "num_experts": "expert_count"}
    return dense(model, "Qwen3MoeForCausalLM", **named(model, keys), norm_topk_prob=True)


def _gemma(model: GgufModel) -> Config:
    return dense(model, "GemmaForCausalLM")


def _gemma2(model: GgufModel) -> Config:
    caps = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
    }
    return _with_gemma_scale(model, dense(model, "Gemma2ForCausalLM", **named(model, caps)), 46)


def _gemma3(model: GgufModel) -> Config:
    keys = {
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    config = dense(model, "Gemma3ForCausalLM", **named(model, keys))
    return _with_gemma_scale(model, config | windows(model), 62)


def _with_gemma_scale(model: GgufModel, config: Config, layers_of_27b: int) -> Config:
    """Set the score scale: from the head size, but in the 27B model from hidden size / heads."""
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config | {"query_pre_attn_scalar": share if is_27b else config["head_dim"]}


def _phi3(model: GgufModel) -> Config:
    """Phi-3; the converter writes a window of 0 for none."""
    config = dense(model, "Phi3ForCausalLM", **named(model, {"sliding_window": "attention.sliding_window"}))
    return config | {"sliding_window": config.get("sliding_window") or None}


def _gpt_oss(model: GgufModel) -> Config:
    keys = {
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
    }
    config = dense(model, "GptOssForCausalLM", **named(model, keys))
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False
    return config


def _granite(model: GgufModel) -> Config:
    model.own.only("rope.scaling.finetuned", True)  # decides whether queries and keys are rotated at all
    return multiplied(model, dense(model, "GraniteForCausalLM", **named(model, MULTIPLIERS)))


def _granite_moe(model: GgufModel) -> Config:
    model.own.only("rope.scaling.finetuned", True)
    keys = {
        **MULTIPLIERS,
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    return multiplied(model, dense(model, "GraniteMoeSharedForCausalLM", **named(model, keys)))


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(_llama, interleaved=True),
    "qwen2": GgufArchitecture(_qwen2),
    "qwen2vl": GgufArchitecture(_qwen2vl),
    "qwen3": GgufArchitecture(_qwen3),
    "qwen2moe": GgufArchitecture(_qwen2_moe),
    "qwen3moe": GgufArchitecture(_qwen3_moe),
    "gemma": GgufArchitecture(_gemma, fields={"norm_offset": 0.0}),
    "gemma2": GgufArchitecture(_gemma2, fields={"norm_offset": 0.0}, places=SANDWICH),
    "gemma3": GgufArchitecture(_gemma3, fields={"norm_offset": 0.0}, places=SANDWICH),
    "gemma3n": GgufArchitecture(gemma3n, places=GEMMA3N_PLACES),
    "phi3": GgufArchitecture(_phi3, apart={}, places=MERGED_MLP),
    "gpt-oss": GgufArchitecture(_gpt_oss, places={**AROUND, "attn_sinks.weight": "self_attn.sinks"}),
    "lfm2": GgufArchitecture(lfm2, places=CONV_PLACES),
    "granite": GgufArchitecture(_granite, interleaved=True),
    "granitemoe": GgufArchitecture(_granite_moe, interleaved=True),
    "granitehybrid": GgufArchitecture(granite_hybrid, places=STATE_PLACES),
    "falcon-h1": GgufArchitecture(falcon_h1, places=PARALLEL_PLACES),
    "olmo2": GgufArchitecture(decoders.olmo2, places=SANDWICH),
    "exaone4": GgufArchitecture(decoders.exaone4, places=SANDWICH),
    "seed_oss": GgufArchitecture(decoders.seed_oss, places=AROUND),
    "smollm3": GgufArchitecture(decoders.smollm3, interleaved=True),
    "ernie4_5": GgufArchitecture(decoders.ernie, interleaved=True),
    "glm4": GgufArchitecture(
        decoders.glm4, interleaved=True, apart=QKV_APART, places={**SANDWICH, **MERGED_MLP}
    ),
    "chatglm": GgufArchitecture(decoders.chatglm, interleaved=True, apart=QKV_APART, places=MERGED_MLP),
    "nemotron": GgufArchitecture(decoders.nemotron, fields={"norm_offset": 0.0}),
    "olmo": GgufArchitecture(decoders.olmo, interleaved=True),
    "phi2": GgufArchitecture(decoders.phi2),
    "mistral3": GgufArchitecture(decoders.mistral3, interleaved=True),
    "arcee": GgufArchitecture(decoders.arcee, interleaved=True),
    "apertus": GgufArchitecture(decoders.apertus, listed=decoders.XIELU),
    "internlm2": GgufArchitecture(decoders.internlm2, interleaved=True, fields={"qkv_grouped": False}),
    "starcoder2": GgufArchitecture(decoders.starcoder2),
    "stablelm": GgufArchitecture(decoders.stablelm),
    "command-r": GgufArchitecture(decoders.command_r, interleaved=True),
    "cohere2": GgufArchitecture(decoders.cohere2, interleaved=True),
    "hunyuan-dense": GgufArchitecture(decoders.hunyuan),
    "glm4moe": GgufArchitecture(sparse.glm4_moe, places={**AROUND, **sparse.BALANCED}),
    "dots1": GgufArchitecture(sparse.dots1, places=sparse.BALANCED),
    "olmoe": GgufArchitecture(sparse.olmoe),
    "ernie4_5-moe": GgufArchitecture(sparse.ernie_moe, interleaved=True, places=sparse.BALANCED),
    "exaone-moe": GgufArchitecture(sparse.exaone_moe, places=sparse.BALANCED),
    "minimax-m2": GgufArchitecture(sparse.minimax_m2, places=sparse.BALANCED),
    "hunyuan-moe": GgufArchitecture(sparse.hunyuan_moe),
    "bailingmoe2": GgufArchitecture(
        sparse.bailing_moe2, apart={"gate_up_proj": ("gate_proj", "up_proj")}, places=sparse.BALANCED
    ),
    "phimoe": GgufArchitecture(sparse.phimoe),
    "afmoe": GgufArchitecture(sparse.afmoe, apart=sparse.GATED_APART, places=sparse.TRINITY_PLACES),
    "deepseek2": GgufArchitecture(deepseek2, interleaved=True, apart=None, places=LATENT_PLACES),
    "lfm2moe": GgufArchitecture(lfm2_moe, places={**CONV_PLACES, **sparse.BALANCED}),
    "qwen3next": GgufArchitecture(
        qwen3_next, apart=DELTA_APART, fields={"norm_offset": 0.0}, places=DELTA_PLACES
    ),
    **{
        name: GgufArchitecture(
            config,
            apart={**DELTA_APART, **DELTA_STEPS_APART},
            fields={"norm_offset": 0.0},
            places=DELTA_PLACES,
            in_turn=True,
        )
        for name, config in {"qwen35": qwen3_5, "qwen35moe": qwen3_5_moe}.items()
    },
    "bert": GgufArchitecture(bert, places=BERT_PLACES),
    "mamba": GgufArchitecture(mamba, places=CHANNEL_PLACES),
    "mamba2": GgufArchitecture(mamba2, places=STATE_PLACES),
    "jamba": GgufArchitecture(jamba, places=CHANNEL_PLACES),
    "nemotron_h": GgufArchitecture(nemotron_h, places=NEMOTRON_PLACES),
    "nemotron_h_moe": GgufArchitecture(nemotron_h, places=NEMOTRON_PLACES),
}
"""Architectures by name."""
