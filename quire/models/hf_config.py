"""Reads a Hugging Face model directory's config.json and generation_config.json into a `ModelArch`.

Invariant: torch-free, and the only reader of these files. Each family's function below states what differs from
Llama and nothing else; a key that asks for something we do not compute is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config.arch import ModelArch
from quire.models.generation_config import generation_file, read_generation_config, token_ids
from quire.models.json_object import JsonObject, read_json_object
from quire.models.registry import ModelRegistry
from quire.models.rope_config import FULL, SLIDING, read_rope, with_kind_renamed

DTYPES = ("float32", "float16", "bfloat16")
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("relu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh")

# Upper limits of sizes, far above any model and far below what would make a mistake in the file hang the machine.
MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCAB = 1024, 4096, 1 << 20, 1 << 24

# Option -> values under which it changes nothing that we compute.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "position_embedding_type": ("absolute", "rope"),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "layer_norm_elementwise_affine": (True,),
}

_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def read_hf_config(model_dir: Path, overrides: dict[str, Any]) -> ModelArch:
    """The shape and options of the model in `model_dir`; `overrides` replace top-level keys of config.json.

    Raises:
        ModelLoadError: a file is missing or malformed; the message names file, key, value and what is allowed.
        UnsupportedModelError: the architecture or an option is one that quire does not implement.
    """
    file = read_json_object(model_dir / "config.json")
    config = JsonObject(file.where, {**file.values, **overrides})
    architecture = _architecture(config)
    reader = ModelRegistry.resolve_config_reader(architecture)
    for key, neutral in _NEUTRAL.items():
        if key in config and config.values[key] not in neutral:
            raise config.unsupported(key, " or ".join(["absent", *map(str, neutral)]))
    arch = reader(architecture, config)
    more = token_ids(generation_file(model_dir), "eos_token_id", arch.vocab_size)
    eos_token_ids = tuple(dict.fromkeys(arch.eos_token_ids + more))
    return replace(arch, eos_token_ids=eos_token_ids, generation=read_generation_config(model_dir))


def read_llama(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Llama's keys, which most families share; `differing` are the fields in which a family departs from Llama."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = _head_dim(config, heads, default=differing.pop("head_dim", None))
    attention_bias = config.flag("attention_bias", False)
    fields: dict[str, Any] = {
        "intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH),
        "num_kv_heads": _kv_heads(config, heads),
        "head_dim": head_dim,
        "hidden_act": config.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
        "norm_eps": config.number("rms_norm_eps", 1e-6, high=1.0),
        "attention_bias": attention_bias,
        "attention_out_bias": attention_bias,
        "mlp_bias": config.flag("mlp_bias", False),
    }
    if "rope" not in differing:
        fields["rope"] = read_rope(config, head_dim=head_dim)
    return _arch(architecture, config, **(fields | differing))


def read_mistral(architecture: str, config: JsonObject) -> ModelArch:
    """Every layer has the window, where there is one."""
    return read_llama(architecture, config, **_uniform_window(config, default=4096))


def read_qwen2(architecture: str, config: JsonObject) -> ModelArch:
    """Biased q, k and v; a window on the upper layers, off unless `use_sliding_window`."""
    layers = _upper_window(config)
    return read_llama(architecture, config, attention_bias=True, attention_out_bias=False, **layers)


def read_qwen3(architecture: str, config: JsonObject) -> ModelArch:
    """q and k are normed per head; a window as in Qwen 2."""
    return read_llama(architecture, config, head_dim=128, qk_norm=True, **_upper_window(config))


def read_phi3(architecture: str, config: JsonObject) -> ModelArch:
    """One window for all layers; its early checkpoints call longrope "su" or "yarn"."""
    renamed = with_kind_renamed(config, {"su": "longrope", "yarn": "longrope"})
    norm_eps = config.number("rms_norm_eps", 1e-5, high=1.0)
    return read_llama(architecture, renamed, norm_eps=norm_eps, **_uniform_window(config, default=None))


def read_gemma2(architecture: str, config: JsonObject, **differing: Any) -> ModelArch:
    """Soft caps, tanh GELU, its own query scale, and a window on every other layer."""
    soft_caps = {
        "attn_logit_softcap": _optional_number(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcap": _optional_number(config, "final_logit_softcapping", 30.0),
    }
    fields = {
        "head_dim": 256,
        "hidden_act": config.choice("hidden_activation", GATED_ACTIVATIONS, "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "query_pre_attn_scalar": config.number("query_pre_attn_scalar", 256.0, low=1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
    }
    windows = {} if "layer_types" in differing else _alternating_window(config, period=2)
    return read_llama(architecture, config, **(fields | soft_caps | windows | differing))


def read_gemma3(architecture: str, config: JsonObject) -> ModelArch:
    """As Gemma 2, without soft caps; q and k are normed, and windowed layers (five of six) have their own rope."""
    period = config.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
    head_dim = config.integer("head_dim", 256, high=MAX_WIDTH)
    local = JsonObject(config.where, {**config.values, "rope_theta": None, "rope_scaling": None})
    local_theta = config.number("rope_local_base_freq", 10000.0, low=1.0)
    return read_gemma2(
        architecture,
        config,
        qk_norm=True,
        attn_logit_softcap=_optional_number(config, "attn_logit_softcapping", None),
        final_logit_softcap=_optional_number(config, "final_logit_softcapping", None),
        rope=read_rope(config, head_dim=head_dim, theta=1e6),
        rope_local=read_rope(local, head_dim=head_dim, theta=local_theta, layer_type=SLIDING),
        **_alternating_window(config, period=period),
    )


def read_opt(architecture: str, config: JsonObject) -> ModelArch:
    """Learned positions; biases everywhere; the norm before or after; the embedding may be narrower."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    bias = config.flag("enable_bias", True)
    norm_before = config.flag("do_layer_norm_before", True)
    return _arch(
        architecture,
        config,
        intermediate_size=config.integer("ffn_dim", high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=_head_dim(config, heads),
        hidden_act=config.choice("activation_function", PLAIN_ACTIVATIONS, "relu"),
        norm_eps=1e-5,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        do_layer_norm_before=norm_before,
        final_norm=norm_before and not config.flag("_remove_final_layer_norm", False),
        word_embed_proj_dim=config.integer("word_embed_proj_dim", hidden_size, high=MAX_WIDTH),
    )


def read_gpt2(architecture: str, config: JsonObject) -> ModelArch:
    """Learned positions, and names of its own for the sizes."""
    config = JsonObject(config.where, config.values, _GPT2_KEYS)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    four_times = 4 * config.integer("hidden_size", high=MAX_WIDTH)
    return _arch(
        architecture,
        config,
        intermediate_size=config.integer("n_inner", four_times, high=MAX_WIDTH),
        num_kv_heads=heads,
        head_dim=_head_dim(config, heads),
        hidden_act=config.choice("activation_function", PLAIN_ACTIVATIONS, "gelu_new"),
        norm_eps=config.number("layer_norm_epsilon", 1e-5, high=1.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )


def _arch(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """The fields that every family reads in the same way, with a family's own on top."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = config.integer("vocab_size", high=MAX_VOCAB)
    common: dict[str, Any] = {
        "architecture": architecture,
        "model_type": config.text("model_type", ""),
        "vocab_size": vocab_size,
        "hidden_size": config.integer("hidden_size", high=MAX_WIDTH),
        "num_layers": num_layers,
        "num_heads": config.integer("num_attention_heads", high=MAX_HEADS),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "dtype": _dtype(config),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "layer_types": (FULL,) * num_layers,
        "eos_token_ids": token_ids(config, "eos_token_id", vocab_size),
        "bos_token_id": config.optional_integer("bos_token_id", low=0),
    }
    return ModelArch(**(common | fields))


def _architecture(config: JsonObject) -> str:
    names = config.texts("architectures")
    if not names:
        raise config.wrong("architectures", "a list with one name")
    return names[0]


def _dtype(config: JsonObject) -> str:
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.choice(key, DTYPES, "float32")


def _head_dim(config: JsonObject, heads: int, default: int | None = None) -> int:
    """The head size named in the file, else the family's default, else an even share of the hidden size."""
    if "head_dim" in config or default is not None:
        return config.integer("head_dim", default, high=MAX_WIDTH)
    size = config.integer("hidden_size", high=MAX_WIDTH)
    if size % heads:
        raise config.wrong("hidden_size", f"a multiple of the number of heads ({heads})")
    return size // heads


def _kv_heads(config: JsonObject, heads: int) -> int:
    kv_heads = config.integer("num_key_value_heads", heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    return kv_heads


def _optional_number(config: JsonObject, key: str, default: float | None) -> float | None:
    """A positive number; an explicit null switches the option off, absence means the family's default."""
    return config.optional_number(key, low=1e-6) if key in config.values else default


def _uniform_window(config: JsonObject, *, default: int | None) -> dict[str, Any]:
    return _windows(config, lambda layer: True, default=default)


def _upper_window(config: JsonObject) -> dict[str, Any]:
    if not config.flag("use_sliding_window", False):
        return {}
    first = config.integer("max_window_layers", 28, low=0)
    return _declared_or(config, lambda layer: layer >= first)


def _alternating_window(config: JsonObject, *, period: int) -> dict[str, Any]:
    return _declared_or(config, lambda layer: (layer + 1) % period != 0)


def _declared_or(config: JsonObject, is_sliding: Callable[[int], bool]) -> dict[str, Any]:
    """Windows on the layers that the file lists; on those that `is_sliding` picks if it lists none."""
    if "layer_types" not in config:
        return _windows(config, is_sliding, default=4096)
    layer_types = config.texts("layer_types")
    if len(layer_types) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong("layer_types", "a list with num_hidden_layers entries")
    if not set(layer_types) <= {FULL, SLIDING}:
        raise config.unsupported("layer_types", f"a list of {FULL} and {SLIDING}")
    return _windows(config, lambda layer: layer_types[layer] == SLIDING, default=4096)


def _windows(config: JsonObject, is_sliding: Callable[[int], bool], *, default: int | None) -> dict[str, Any]:
    """Fields for a window on the picked layers; none if no layer is picked or the file says null."""
    picked = [is_sliding(layer) for layer in range(config.integer("num_hidden_layers", high=MAX_LAYERS))]
    window = default if "sliding_window" not in config.values else config.optional_integer("sliding_window")
    if window is None or not any(picked):
        return {}
    return {
        "layer_types": tuple(SLIDING if sliding else FULL for sliding in picked),
        "sliding_window": window,
    }
