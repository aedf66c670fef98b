"""The architectures that quire reads from GGUF: which family of Hugging Face's each is, and what it calls things.

Invariant: torch-free. A row's `config` makes the keys of config.json that the family's reader takes, and says no more
than that; it asks `GgufModel.own` for every key of the architecture that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.models.families.fields import MAX_LAYERS
from quire.models.gguf.hybrids import (
    CONV_PLACES,
    PARALLEL_PLACES,
    STATE_PLACES,
    falcon_h1,
    granite_hybrid,
    lfm2,
)
from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import EXPERTS, MULTIPLIERS, Config, dense, named
from quire.models.gguf.tensor_names import SANDWICH, Places


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture, by its name in `general.architecture`."""

    config: Callable[[GgufModel], Config]
    """The keys of config.json, but for those that every file has."""
    interleaved: bool = False
    """Whether rotated dimensions lie in pairs: the files of some families have q and k in that order."""
    merged: bool = False
    """Whether q, k and v, and gate and up, are one tensor each."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of `ModelArch`, what is otherwise in these files than in the family's own."""
    places: Places = field(default_factory=dict)
    """Of tensors that are elsewhere than `tensor_names.SHARED` says."""


def _llama(model: GgufModel) -> Config:
    """Llama, Mistral, Mixtral and what has their shape: windows are not in the file."""
    if not model.own.integer("expert_count", 0, low=0):
        model.own.only("expert_used_count", 0)
        biased = "blk.0.attn_q.bias" in model.tensors
        mlp_biased = "blk.0.ffn_up.bias" in model.tensors
        return dense(model, "LlamaForCausalLM", attention_bias=biased, mlp_bias=mlp_biased)
    experts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return dense(model, "MixtralForCausalLM", **named(model, experts))


def _qwen2(model: GgufModel) -> Config:
    return dense(model, "Qwen2ForCausalLM")


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
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    config = dense(model, "Gemma3ForCausalLM", **named(model, keys))
    return _with_gemma_scale(model, config | _pattern(model), 62)


def _with_gemma_scale(model: GgufModel, config: Config, layers_of_27b: int) -> Config:
    """Scores are scaled by the size of a head, but in the model with 27 billion parameters by a head's share."""
    share = model.own.integer("embedding_length") // model.own.integer("attention.head_count")
    is_27b = config["num_hidden_layers"] == layers_of_27b
    return config | {"query_pre_attn_scalar": share if is_27b else config["head_dim"]}


def _pattern(model: GgufModel) -> Config:
    """Which layers have the window: every so many have none, or a word for each."""
    pattern = model.own.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {} if pattern is None else {"sliding_window_pattern": pattern}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[bool(slides)] for slides in pattern[:MAX_LAYERS]]}


def _phi3(model: GgufModel) -> Config:
    return dense(model, "Phi3ForCausalLM", **named(model, {"sliding_window": "attention.sliding_window"}))


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
    model.own.only("rope.scaling.finetuned", True)  # says whether queries and keys are rotated at all
    return dense(model, "GraniteForCausalLM", **named(model, MULTIPLIERS))


def _granite_moe(model: GgufModel) -> Config:
    model.own.only("rope.scaling.finetuned", True)
    keys = {
        **MULTIPLIERS,
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "shared_intermediate_size": "expert_shared_feed_forward_length",
    }
    return dense(model, "GraniteMoeSharedForCausalLM", **named(model, keys))


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(_llama, interleaved=True),
    "qwen2": GgufArchitecture(_qwen2),
    "qwen3": GgufArchitecture(_qwen3),
    "qwen2moe": GgufArchitecture(_qwen2_moe),
    "qwen3moe": GgufArchitecture(_qwen3_moe),
    "gemma": GgufArchitecture(_gemma, fields={"norm_offset": 0.0}),
    "gemma2": GgufArchitecture(_gemma2, fields={"norm_offset": 0.0}, places=SANDWICH),
    "gemma3": GgufArchitecture(_gemma3, fields={"norm_offset": 0.0}, places=SANDWICH),
    "phi3": GgufArchitecture(_phi3, merged=True, places={"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": GgufArchitecture(
        _gpt_oss,
        places={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
    ),
    "lfm2": GgufArchitecture(lfm2, places=CONV_PLACES),
    "granite": GgufArchitecture(_granite, interleaved=True),
    "granitemoe": GgufArchitecture(_granite_moe, interleaved=True),
    "granitehybrid": GgufArchitecture(granite_hybrid, places=STATE_PLACES),
    "falcon-h1": GgufArchitecture(falcon_h1, places=PARALLEL_PLACES),
}
"""By name."""
