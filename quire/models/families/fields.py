# SPDX-License-Identifier: Apache-2.0
"""Fields of config.json that several families read alike.

Invariant: each function here is used by at least two families; the fields of a single family are in its file. The
registry reads `is_causal` for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from quire.config.arch import ModelArch
from quire.models.generation_config import token_ids
from quire.models.json_object import JsonObject
from quire.models.rope_config import FULL, SLIDING, read_rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.config.arch import ModelArch
    from quire.models.json_object import JsonObject

    Reader = Callable[[str, JsonObject], ModelArch]


DTYPES = ("float32", "float16", "bfloat16")
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")

# Upper limits of sizes, far above any model, and low enough that a mistake in the file cannot hang the machine.
MAX_LAYERS, MAX_HEADS, MAX_WIDTH, MAX_VOCAB = 1024, 4096, 1 << 20, 1 << 24
MAX_EXPERTS = 4096


def read_arch(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Read the fields that every family reads alike; `fields` replaces those that this one has or reads otherwise."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = config.integer("vocab_size", high=MAX_VOCAB)
    readers: dict[str, Callable[[], Any]] = {
        "architecture": lambda: architecture,
        "model_type": lambda: config.text("model_type", ""),
        "vocab_size": lambda: vocab_size,
        "hidden_size": lambda: config.integer("hidden_size", high=MAX_WIDTH),
        "num_layers": lambda: num_layers,
        "num_heads": lambda: config.integer("num_attention_heads", high=MAX_HEADS),
        "max_position_embeddings": lambda: config.integer("max_position_embeddings"),
        "dtype": lambda: _dtype(config),
        "tie_word_embeddings": lambda: config.flag("tie_word_embeddings", False),
        "layer_types": lambda: (FULL,) * num_layers,
        "eos_token_ids": lambda: token_ids(config, "eos_token_id", vocab_size),
        "bos_token_id": lambda: config.optional_integer("bos_token_id", low=0),
    }
    return ModelArch(**_absent(fields, readers), **fields)


def _absent(fields: dict[str, Any], readers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: read() for name, read in readers.items() if name not in fields}


def read_llama(architecture: str, config: JsonObject, **fields: Any) -> ModelArch:
    """Read Llama's keys, which most families share; `fields` replaces those that a family has or reads otherwise.

    Two more set defaults: `theta`, for `rope_theta`, and `default_head_dim`.
    """
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    default_head_dim, theta = fields.pop("default_head_dim", None), fields.pop("theta", 10000.0)
    head_dim = fields.pop("head_dim", None) or read_head_dim(config, heads, default_head_dim)
    readers: dict[str, Callable[[], Any]] = {
        "intermediate_size": lambda: config.integer("intermediate_size", high=MAX_WIDTH),
        "num_kv_heads": lambda: read_kv_heads(config, heads),
        "hidden_act": lambda: config.choice("hidden_act", GATED_ACTIVATIONS, "silu"),
        "norm_eps": lambda: config.number("rms_norm_eps", 1e-6, high=1.0),
        "attention_bias": lambda: config.flag("attention_bias", False),
        "attention_out_bias": lambda: config.flag("attention_bias", False),
        "mlp_bias": lambda: config.flag("mlp_bias", False),
        "rope": lambda: read_rope(config, head_dim=head_dim, theta=theta),
    }
    return read_arch(architecture, config, head_dim=head_dim, **_absent(fields, readers), **fields)


def either(config: JsonObject, keys: Mapping[str, str]) -> JsonObject:
    """Return the object with aliases for usual keys that the file has under other names."""
    others = {usual: other for usual, other in keys.items() if usual not in config}
    return config.with_aliases({**config.aliases, **others})


def rms_eps(config: JsonObject, default: float) -> float:
    """Return epsilon of RMS norms."""
    return config.number("rms_norm_eps", default, high=1.0)


def biases(
    everywhere: bool | None = None, *, qkv: bool = False, out: bool = False, mlp: bool = False
) -> dict[str, bool]:
    """Return the bias flags of linear layers: all or none, or those that are named."""
    qkv, out, mlp = (qkv, out, mlp) if everywhere is None else (everywhere,) * 3
    return {"attention_bias": qkv, "attention_out_bias": out, "mlp_bias": mlp}


def layer_norm(config: JsonObject, key: str = "layer_norm_eps", default: float = 1e-5) -> dict[str, Any]:
    """Return the fields of layer norms in place of RMS norms."""
    return {"norm": "layer", "norm_eps": config.number(key, default, high=1.0)}


def plain_mlp(config: JsonObject, default: str, key: str = "hidden_act") -> dict[str, Any]:
    """Return the fields of an MLP without a gate, and its activation."""
    return {"mlp": "plain", "hidden_act": config.choice(key, PLAIN_ACTIVATIONS, default)}


def read_head_dim(config: JsonObject, heads: int, default: int | None = None) -> int:
    """Return the file's head size, else the family's default, else hidden size / heads."""
    if "head_dim" in config or default is not None:
        return config.integer("head_dim", default, high=MAX_WIDTH)
    size = config.integer("hidden_size", high=MAX_WIDTH)
    if size % heads:
        raise config.wrong("hidden_size", f"a multiple of the number of heads ({heads})")
    return size // heads


def read_kv_heads(config: JsonObject, heads: int, key: str = "num_key_value_heads") -> int:
    """Return the number of key-value heads; by default that of query heads."""
    kv_heads = config.integer(key, heads, high=MAX_HEADS)
    if heads % kv_heads:
        raise config.wrong(key, f"a divisor of num_attention_heads ({heads})")
    return kv_heads


def optional_number(config: JsonObject, key: str, default: float | None) -> float | None:
    """Return a positive number; an explicit null disables the option, absence means the family's default."""
    return config.optional_number(key, low=1e-6) if key in config.values else default


def uniform_window(config: JsonObject, *, default: int | None) -> dict[str, Any]:
    """Return the fields of a window on every layer."""
    return _windows(config, lambda layer: True, default=default)


def upper_window(config: JsonObject) -> dict[str, Any]:
    """Return the fields of a window from layer `max_window_layers` on, off unless `use_sliding_window`."""
    if not config.flag("use_sliding_window", False):
        return {}
    first = config.integer("max_window_layers", 28, low=0)
    return declared_windows(config, lambda layer: layer >= first)


def alternating_window(config: JsonObject, *, period: int, default: int | None = 4096) -> dict[str, Any]:
    """Return the fields of a window on all but every `period`-th layer."""
    return declared_windows(config, lambda layer: (layer + 1) % period != 0, default=default)


def declared_windows(
    config: JsonObject, is_sliding: Callable[[int], bool], default: int | None = 4096
) -> dict[str, Any]:
    """Return the fields of windows on the layers that the file lists, else on those that `is_sliding` picks."""
    if "layer_types" not in config:
        return _windows(config, is_sliding, default=default)
    layer_types = config.texts("layer_types")
    if len(layer_types) != config.integer("num_hidden_layers", high=MAX_LAYERS):
        raise config.wrong("layer_types", "a list with num_hidden_layers entries")
    if not set(layer_types) <= {FULL, SLIDING}:
        raise config.unsupported("layer_types", f"a list of {FULL} and {SLIDING}")
    return _windows(config, lambda layer: layer_types[layer] == SLIDING, default=default)


def layer_kinds(
    config: JsonObject, kinds: Mapping[str, str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """Return each layer's mixer kind: the file's list, mapped by `kinds`, or else `default`."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if "layer_types" not in config:
        return tuple(default(layer) for layer in range(num_layers))
    words = config.texts("layer_types")
    if len(words) != num_layers:
        raise config.wrong("layer_types", "a list with num_hidden_layers entries")
    if not set(words) <= kinds.keys():
        raise config.unsupported("layer_types", f"a list of {' and '.join(kinds)}")
    return tuple(kinds[word] for word in words)


def _windows(config: JsonObject, is_sliding: Callable[[int], bool], *, default: int | None) -> dict[str, Any]:
    """Return the fields of a window on the picked layers; none if no layer is picked or the file says null."""
    picked = [is_sliding(layer) for layer in range(config.integer("num_hidden_layers", high=MAX_LAYERS))]
    window = default if "sliding_window" not in config.values else config.optional_integer("sliding_window")
    if window is None or not any(picked):
        return {}
    return {
        "layer_types": tuple(SLIDING if sliding else FULL for sliding in picked),
        "sliding_window": window,
    }


def unrotated_layers(config: JsonObject) -> tuple[int, ...]:
    """Return the layers without positions (NoPE, arXiv:2305.19466): those that the file names, else every fourth."""
    num_layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    interval = config.integer("no_rope_layer_interval", 4)
    rotated = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if config.get("no_rope_layers"):
        rotated = [number != 0 for number in config.numbers("no_rope_layers")]
        if len(rotated) < num_layers:
            raise config.wrong("no_rope_layers", "a list with num_hidden_layers entries")
    return tuple(layer for layer in range(num_layers) if not rotated[layer])


def full_layers(windows: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers without a window in a model where some have one; () in others."""
    types = windows.get("layer_types", ())
    return tuple(layer for layer, kind in enumerate(types) if kind == FULL)


def _dtype(config: JsonObject) -> str:
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.choice(key, DTYPES, "float32")


def with_bidirectional(reader: Reader) -> Reader:
    """Return a family's reader that also reads `is_causal`, as decoders fine-tuned as encoders have it.

    It is refused with windows, whose bidirectional width is undefined. Sources: LLM2Vec (BehnamGhader et al., 2024,
    arXiv:2404.05961), GTE (Li et al., 2023, arXiv:2308.03281).
    """

    @wraps(reader)
    def read(architecture: str, config: JsonObject) -> ModelArch:
        arch = reader(architecture, config)
        if config.flag("is_causal", True):
            return arch
        if arch.sliding_window is not None:
            config.refuse("is_causal", "true where layers have windows")
        return replace(arch, bidirectional=True)

    return read
