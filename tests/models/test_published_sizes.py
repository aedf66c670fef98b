# SPDX-License-Identifier: Apache-2.0
"""Config files as they are published, options that change nothing included, give the known number of parameters."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from quire.models import loader
from tests.models.harness import prepared_config


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **options: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "use_cache": True,
        "pretraining_tp": 1,
        "torch_dtype": "bfloat16",
        **options,
    }


DEEPSEEK_V2_LITE = {
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512,
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_experts_per_tok": 6, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    "seq_aux": True, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
CHATGLM = {
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "ffn_hidden_size": 13696,
    "fp32_residual_connection": False, "hidden_size": 4096, "kv_channels": 128, "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 40,
    "original_rope": True, "padded_vocab_size": 151552, "post_layer_norm": True, "rmsnorm": True, "rope_ratio": 500,
    "seq_length": 131072, "vocab_size": 151552, "tie_word_embeddings": False,
}  # fmt: skip
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
    "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "n_embed": 1024, "n_inner": None,
    "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "seq_length": 2048, "slow_but_exact": False,
    "skip_bias_add": True, "vocab_size": 250880,
}  # fmt: skip
MPT_ATTENTION = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
COMMAND_R7B = {
    "layer_switch": 4, "sliding_window": 4096, "sliding_window_pattern": 4, "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_qk_norm": False, "logit_scale": 0.25,
}  # fmt: skip
HUNYUAN_ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "type": "dynamic",
}
QWEN = {
    "emb_dropout_prob": 0.0, "kv_channels": 128, "layer_norm_epsilon": 1e-6, "no_bias": True, "rotary_emb_base": 10000,
    "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192, "use_dynamic_ntk": True, "use_logn_attn": True,
}  # fmt: skip
JAIS = {
    "activation_function": "swiglu", "embeddings_scale": 14.6, "width_scale": 0.111, "scale_qk_dot_by_d": True,
    "position_embedding_type": "alibi", "n_embd": 5120, "n_head": 40, "n_inner": 13653, "n_layer": 40,
    "n_positions": 2048, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "vocab_size": 84992,
}  # fmt: skip

FALCON_H1 = {
    "attention_in_multiplier": 1.0, "attn_layer_indices": None, "key_multiplier": 0.39, "mamba_chunk_size": 128,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.88, 0.5], "projectors_bias": False, "rope_theta": 1e11, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.31], "ssm_out_multiplier": 0.23,
}  # fmt: skip
GPT_OSS = {
    "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
    "num_experts_per_tok": 4, "num_local_experts": 32, "output_router_logits": False, "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
PHI_MOE = {
    "attention_bias": True, "lm_head_bias": True, "input_jitter_noise": 0.01, "num_experts_per_tok": 2,
    "num_local_experts": 16, "router_jitter_noise": 0.01, "sliding_window": 131072,
    "rope_scaling": {
        "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    },
}  # fmt: skip

PUBLISHED: dict[str, tuple[str, float, dict[str, Any]]] = {
    "apertus-8b": (
        "Apertus", 8.05, llama(4096, 21504, 32, 32, 8, 131072, hidden_act="xielu", qk_norm=True, post_norm=False),
    ),
    "baichuan2-13b": (
        "Baichuan", 13.90, llama(5120, 13696, 40, 40, 40, 125696, model_max_length=4096, z_loss_weight=0),
    ),
    "bloom-560m": ("Bloom", 0.5592, BLOOM),
    "chatglm-glm4-9b": ("ChatGLMModel", 9.400, CHATGLM),
    "command-r": ("Cohere", 34.98, llama(8192, 22528, 40, 64, 64, 256000, model_max_length=131072, logit_scale=0.0625)),
    "command-r7b": ("Cohere2", 8.028, llama(4096, 14336, 32, 32, 8, 256000, **COMMAND_R7B)),
    "dbrx": (
        "Dbrx", 131.6, {
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
            "d_model": 6144, "emb_pdrop": 0.0, "max_seq_len": 32768, "n_heads": 48, "n_layers": 40,
            "resid_pdrop": 0.0, "vocab_size": 100352, "ffn_config": {
                "ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05,
                "moe_num_experts": 16, "moe_top_k": 4,
            },
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", 15.706, llama(2048, 10944, 27, 16, 16, 102400, **DEEPSEEK_V2_LITE)),
    "ernie-0.3b": ("Ernie4_5", 0.3607, llama(1024, 3072, 18, 16, 2, 103424, head_dim=128, use_bias=False, **TIED)),
    "exaone-2.4b": (
        "Exaone", 2.405, {
            "hidden_size": 2560, "intermediate_size": 7168, "num_layers": 30, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 80, "vocab_size": 102400, "max_position_embeddings": 32768,
            "activation_function": "silu", "layer_norm_epsilon": 1e-5, **TIED,
        },
    ),
    "falcon-7b": (
        "Falcon", 6.922, {
            "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False, "hidden_size": 4544,
            "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
            "num_kv_heads": 71, "parallel_attn": True, "vocab_size": 65024,
        },
    ),
    "falcon-40b": (
        "Falcon", 41.30, {
            "alibi": False, "bias": False, "hidden_size": 8192, "multi_query": True, "new_decoder_architecture": True,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
            "vocab_size": 65024,
        },
    ),
    "falcon-h1-0.5b": ("FalconH1", 0.5214, llama(1024, 2048, 36, 8, 2, 32784, head_dim=64, **FALCON_H1)),
    "gemma-2b": ("Gemma", 2.506, llama(2048, 16384, 18, 8, 1, 256000, head_dim=256, hidden_act="gelu")),
    "gpt-j-6b": (
        "GPTJ", 6.051, {
            "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True,
            "rotary_dim": 64, "scale_attn_weights": True, "tie_word_embeddings": False, "vocab_size": 50400,
        },
    ),
    "gpt-neox-20b": (
        "GPTNeoX", 20.55, llama(
            6144, 24576, 44, 64, 64, 50432, rotary_pct=0.25, rotary_emb_base=10000, hidden_act="gelu_fast"
        ),
    ),
    "gpt-oss-20b": ("GptOss", 20.91, llama(2880, 2880, 24, 64, 8, 201088, **GPT_OSS)),
    "granite-2b": (
        "Granite", 2.534, llama(
            2048, 8192, 40, 32, 8, 49155, attention_multiplier=0.015625, embedding_multiplier=12.0,
            residual_multiplier=0.22, logits_scaling=8.0, **TIED,
        ),
    ),
    "hunyuan-7b": (
        "HunYuanDenseV1", 7.505, llama(
            4096, 14336, 32, 32, 8, 128167, head_dim=128, use_qk_norm=True, use_cla=False, norm_type="rms",
            rope_scaling=HUNYUAN_ROPE, **TIED,
        ),
    ),
    "internlm2-7b": (
        "InternLM2", 7.738, llama(
            4096, 14336, 32, 32, 8, 92544, bias=False, rope_scaling={"type": "dynamic", "factor": 2.0}
        ),
    ),
    "jais-13b": ("JAISLMHeadModel", 13.02, JAIS),
    "minicpm-2b": (
        "MiniCPM", 2.725, llama(2304, 5760, 40, 36, 36, 122753, scale_emb=12, scale_depth=1.4, dim_model_base=256),
    ),
    "minitron-4b": (
        "Nemotron", 4.190, llama(3072, 9216, 32, 24, 8, 256000, head_dim=128, hidden_act="relu2", norm_eps=1e-5),
    ),
    "mpt-7b": (
        "MPT", 6.649, {
            "attn_config": MPT_ATTENTION, "d_model": 4096, "embedding_fraction": 1.0, "expansion_ratio": 4,
            "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "n_heads": 32, "n_layers": 32,
            "no_bias": True, "norm_type": "low_precision_layernorm", "vocab_size": 50432,
        },
    ),
    "olmo-1b": ("Olmo", 1.177, llama(2048, 8192, 16, 16, 16, 50304, clip_qkv=None, **TIED)),
    "olmo2-7b": ("Olmo2", 7.299, llama(4096, 11008, 32, 32, 32, 100352)),
    "orion-14b": ("Orion", 14.50, llama(5120, 15360, 40, 40, 40, 84608)),
    "persimmon-8b": ("Persimmon", 9.40, llama(4096, 16384, 36, 64, 64, 262144, hidden_act="relu2")),
    "phi-3.5-moe": ("Phimoe", 41.87, llama(4096, 6400, 32, 32, 8, 32064, **PHI_MOE)),
    "phi-2": ("Phi", 2.780, llama(2560, 10240, 32, 32, 32, 51200, hidden_act="gelu_new", partial_rotary_factor=0.4)),
    "pythia-1.4b": ("GPTNeoX", 1.415, llama(2048, 8192, 24, 16, 16, 50304, hidden_act="gelu", rotary_pct=0.25)),
    "qwen-7b": ("QWenLMHeadModel", 7.721, llama(4096, 22016, 32, 32, 32, 151936, **QWEN)),
    "seed-oss-36b": ("SeedOss", 36.15, llama(5120, 27648, 64, 80, 8, 155136, head_dim=128, attention_bias=True)),
    "smollm3-3b": (
        "SmolLM3", 3.075, llama(2048, 11008, 36, 16, 4, 128256, no_rope_layer_interval=4, use_sliding_window=False),
    ),
    "stablelm-1.6b": (
        "StableLm", 1.645, llama(2048, 5632, 24, 32, 32, 100352, use_qkv_bias=True, partial_rotary_factor=0.25),
    ),
    "starcoder-1b": (
        "GPTBigCode", 1.137, {
            "activation_function": "gelu_pytorch_tanh", "multi_query": True, "n_embd": 2048, "n_head": 16,
            "n_inner": 8192, "n_layer": 24, "n_positions": 8192, "scale_attn_weights": True, "vocab_size": 49152,
        },
    ),
    "starcoder2-3b": (
        "Starcoder2", 3.030, llama(3072, 12288, 30, 24, 2, 49152, hidden_act="gelu_pytorch_tanh", use_bias=True),
    ),
    "xglm-564m": (
        "XGLM", 0.5645, {
            "activation_function": "gelu", "attention_heads": 16, "d_model": 1024, "ffn_dim": 4096, "num_layers": 24,
            "max_position_embeddings": 2048, "scale_embedding": True, "vocab_size": 256008,
        },
    ),
}  # fmt: skip
"""Model -> its architecture, its billions of parameters, and the keys of its config.json that matter or might."""


@pytest.mark.more
@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_are_published(name: str, tmp_path: Path) -> None:
    architecture, billions, values = PUBLISHED[name]
    full_name = architecture if architecture.endswith("Model") else f"{architecture}ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [full_name]}))
    model = loader.without_weights(prepared_config(tmp_path, max_model_len=64))
    slots = model.checkpoint_slots().values()
    assert sum(prod(parts[0].source.shape) for parts in slots) / 1e9 == pytest.approx(billions, rel=1e-3)
