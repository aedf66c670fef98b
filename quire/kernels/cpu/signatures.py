# SPDX-License-Identifier: Apache-2.0
"""Arguments of the kernels of the C++ library."""

from __future__ import annotations

SIGNATURES: dict[str, tuple[str, str]] = {
    "rms_norm": ("out x weight", "qqqqqdqq"),
    "fused_add_rms_norm": ("out total x residual weight", "qqdqq"),
    "activate": ("out x", "qqq"),
    "silu_and_mul": ("out x", "qqq"),
    "round_rows": ("out x", "qqqqddddq"),
    "rotary_embedding": ("q k positions cos_sin_cache", "qqqqqqqqqqq"),
    "pack_weight": ("data scales zeros weight", "qqqqqqqq"),
    "packed_linear": ("out x data scales zeros bias scratch", "qqqqqqqqqqq"),
    "rounded_linear": ("out x data scales code_sums bias scratch", "qqqqqqqqddddq"),
    "low_rank_linear": ("out x adapter_rows adapters scratch", "qq"),
    "experts": ("out x chosen weights table adapter_rows adapters scratch", "qqqqqqqqqqqqqqqqqqq"),
    "add_choices": ("out rows chosen weights", "qqq"),
    "route": ("chosen weights logits bias", "qqqqqqqqddq"),
    "causal_conv": ("out x weight bias states query_start_loc seq_lens kept_lens block_tables", "qqqqqqqqqq"),
    "selective_scan": (
        "out x dt a b c skip gate states query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqqq",
    ),
    "ssd_scan": (
        "out x dt a b c skip dt_bias gate states query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqqqqqdd",
    ),
    "gated_delta": (
        "out qkv ba rates dt_bias states gates decays query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqdd",
    ),
    "rg_lru": (
        "out x weights bias rates states gates query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqq",
    ),
    "rwkv7": (
        "out r w k v a of_heads states scratch query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqd",
    ),
    "packed_embedding": ("out ids data scales zeros", "qqqqqqqq"),
    "layer_norm": ("out x weight bias", "qqqqqdqq"),
    "fused_add_layer_norm": ("out total x residual weight bias", "qqdqq"),
    "accumulate": ("vectors x chunks", "qqqqqqq"),
    "gelu_and_mul": ("out x", "qqqq"),
    "embedding": ("out ids weight", "qqq"),
    "write_kv": ("k v k_cache v_cache slot_mapping scales", "qqqqqqqqqqq"),
    "rotary_and_write_kv": (
        "q k v k_cache v_cache positions cos_sin_cache slot_mapping scales q_norm k_norm",
        "qqqqqqqqqqqqqqqdqqq",
    ),
    "paged_attention": (
        "out q k_cache v_cache query_start_loc seq_lens block_tables alibi_slopes sinks last_seen relative_bias",
        "qqqqqqqqqqqqqddqq",
    ),
    "bidirectional_attention": (
        "out q k v query_start_loc seq_lens alibi_slopes relative_bias",
        "qqqqqqqqqqqqqdq",
    ),
    "per_head_linear": ("out x data scales zeros scratch", "qqqqqqqqqqqq"),
    "write_latents": ("q rows norm positions cos_sin_cache cache slot_mapping", "qqqqqqqqqqdqqq"),
    "latent_attention": ("out q q_rope cache query_start_loc seq_lens block_tables", "qqqqqqqqqqqqdqq"),
    "all_reduce": ("out x segment", "qqq"),
    "all_gather": ("out x segment", "qqq"),
    "all_to_all": ("out x segment counts", "qq"),
    "unusable_rows": ("out logits", "qq"),
    "mask_logits": ("logits rows words", "qqq"),
    "apply_penalties": ("logits indices repetition subtracted", "qq"),
    "philox_uniform": ("out seeds positions", "q"),
    "sample_tokens": ("out logits settings numbers", "qq"),
    "token_logprobs": ("ids logprobs ranks logits chosen", "qqq"),
    "peak_fma": ("out", "q"),
    "read_memory": ("out data", "q"),
}
"""Arguments of each kernel: the names of its tensors, which come first, and the `struct` codes of its numbers, an int64
("q") and a float, which is passed as a double ("d"). The library reports its own, and is not loaded if they differ.
Every kernel returns an int64 status.
"""
