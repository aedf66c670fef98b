"""DeepSeek-V2 and V3 and what has their latent attention, all of which GGUF calls `deepseek2`; see `architectures`.

Invariant: torch-free.
"""

from __future__ import annotations

from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import SIZES, Config, biased, named, num_guessing, rotary
from quire.models.gguf.sparse import BALANCED, SIGMOID, SOFTMAX, deepseek_experts
from quire.models.gguf.tensor_names import Place, Places

LATENT_PLACES: Places = {
    **BALANCED,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": Place("self_attn.k_up", rows=True),
    "attn_v_b": Place("self_attn.v_up", rows=True),
}
"""Keys are made by a matrix that is turned round there, as it is multiplied with queries."""
_SIZES = {key: name for key, name in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}


def deepseek2(model: GgufModel) -> Config:
    """Sigmoids choose experts in V3 and later; Youtu has none. One matrix for keys and values, as once, is refused."""
    own = model.own
    if "blk.0.attn_k_b.weight" not in model.tensors:
        own.refuse("attention.key_length_mla", "there, and keys and values made by a matrix each (attn_k_b)")
    rotated, key, value = (
        own.integer("rope.dimension_count"),
        own.integer("attention.key_length_mla"),
        own.integer("attention.value_length_mla"),
    )
    for name in ("attention.key_length", "attention.value_length", "attention.head_count_kv", "vocab_size"):
        own.get(name)  # follow from others
    keys = {"kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank"}
    config = named(model, {**_SIZES, **keys}) | deepseek_experts(model)
    return config | {
        "num_hidden_layers": own.integer("block_count") - num_guessing(model),
        **_choice(model, config),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "attention_bias": biased(model, "attn_kv_a_mqa"),
        **_rope(model, rotated),
    }


def _choice(model: GgufModel, config: Config) -> Config:
    """The family, by how it chooses experts; files that do not say it have a bias where sigmoids do."""
    if not config.get("n_routed_experts"):
        return {"architectures": ["YoutuForCausalLM"]}
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    if model.own.integer("expert_gating_func", SIGMOID if corrected else SOFTMAX) == SIGMOID:
        v3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return v3 | {"architectures": ["DeepseekV3ForCausalLM"]}
    limited = config.get("n_group", 1) > 1
    v2 = {"topk_method": "group_limited_greedy" if limited else "greedy"}
    return v2 | {"architectures": ["DeepseekV2ForCausalLM"]}


def _rope(model: GgufModel, rotated: int) -> Config:
    """With what scores are scaled by where positions are stretched, of which files have a tenth."""
    config = rotary(model, rotated)
    if config["rope_scaling"].get("rope_type") == "yarn":
        scale = 10.0 * model.own.number("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_scaling"] |= {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return config
