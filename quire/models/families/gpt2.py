"""GPT-2 (Radford et al., 2019) and what came of it: learned positions, layer norms, plain MLPs, biases everywhere."""

from __future__ import annotations

from typing import Any

from quire.config.arch import QKV_APART, CheckpointNames, ModelArch
from quire.models.families.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    biases,
    either,
    layer_norm,
    plain_mlp,
    read_arch,
    read_head_dim,
)
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING

KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
RENAMED = {
    "model": "transformer",
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "norm": "ln_f",
}
# Early checkpoints also hold the causal mask as a tensor.
UNUSED = (r"\.attn\.(masked_)?bias$",)


def read_gpt2(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """q, k and v come merged, and all weights transposed."""
    config = either(config, KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    mlp = {} if "mlp" in differing else plain_mlp(config, "gelu_new", "activation_function")
    fields: dict[str, Any] = {
        "names": CheckpointNames(RENAMED, {}, UNUSED),
        "intermediate_size": config.integer("n_inner", four_times, high=MAX_WIDTH),
        "num_kv_heads": heads,
        "head_dim": read_head_dim(config, heads),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "positions": "learned",
        "transposed_weights": True,
        **layer_norm(config, "layer_norm_epsilon"),
        **biases(True),
        **mlp,
    }
    return read_arch(architecture, config, **(fields | differing))


def read_gpt_bigcode(architecture: str, config: JsonObject) -> ModelArch:
    """StarCoder and SantaCoder (Li et al., 2023, arXiv:2305.06161): one key-value head; weights as Llama has them."""
    heads = either(config, KEYS).integer("num_attention_heads", high=MAX_HEADS)
    return read_gpt2(
        architecture,
        config,
        num_kv_heads=1 if config.flag("multi_query", True) else heads,
        qkv_grouped=True,
        transposed_weights=False,
        **plain_mlp(config, "gelu_pytorch_tanh", "activation_function"),
    )


def read_gpt_neo(architecture: str, config: JsonObject) -> ModelArch:
    """GPT-Neo (Black et al., 2021): scores are not scaled; some layers have a window; q, k and v without biases."""
    keys = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    config = either(config, keys)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    names = RENAMED | {"self_attn": "attn.attention", "o_proj": "out_proj"}
    return read_gpt2(
        architecture,
        config,
        names=CheckpointNames(names, QKV_APART, (r"\.attention\.(masked_)?bias$",)),
        intermediate_size=config.integer("intermediate_size", four_times, high=MAX_WIDTH),
        transposed_weights=False,
        attention_scale=1.0,
        **biases(out=True, mlp=True),
        **_gpt_neo_windows(config),
    )


def _gpt_neo_windows(config: JsonObject) -> dict[str, Any]:
    """The file says how often a few kinds of layers repeat: [[["global", "local"], 12]]."""
    kinds = {"global": FULL, "local": SLIDING}
    repeats = config.get("attention_types") or [[["global", "local"], 12]]
    try:
        types = tuple(
            kinds[kind] for group, times in repeats for _ in range(min(times, MAX_LAYERS)) for kind in group
        )
    except (TypeError, ValueError, KeyError):
        raise config.wrong("attention_types", 'a list such as [[["global", "local"], 12]]') from None
    if len(types) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong("attention_types", "a list that makes num_layers layers")
    return {"layer_types": types, "sliding_window": config.integer("window_size", 256)}
