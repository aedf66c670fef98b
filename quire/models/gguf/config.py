# SPDX-License-Identifier: Apache-2.0
"""Conversion of a GGUF file's metadata to a `ModelArch`, through the equivalent config.json of the model's family.

Invariant: torch-free. Only the family's reader in `families/` interprets config.json keys; this module and
`architectures` map GGUF names to them. An unread key of the architecture is refused: it may change the computation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config.arch import CheckpointNames, ExpertStack, ModelArch
from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.config_overrides import with_overrides
from quire.models.generation_config import sampling_defaults
from quire.models.gguf.architectures import ARCHITECTURES, GgufArchitecture
from quire.models.gguf.model import GgufModel, stated_pooling
from quire.models.gguf.shapes import FACTORS, FREQUENCIES, num_mtp_layers, place_of
from quire.models.gguf.sparse import CORRECTION_BIAS
from quire.models.hf_config import read_config
from quire.models.json_object import JsonObject

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TURN_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
"""Tokens that end an answer in files without such ids, as a model's generation_config.json would say."""
_HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""End tokens of gpt-oss, whose <|end|> only ends one message of an answer."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED_DTYPE = "float16"
"""Dtype of quantized weights that are dequantized: its rounding error is 1/8 of bfloat16's."""
_NORMS_TOGETHER = {"each_head_layer_apart": "each_head_layer"}
"""Norms that the family's own files store with a tensor per head."""
_SAY_NOTHING = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon")
"""Keys without effect: the tensors imply them, or no model here uses them."""
_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention.sliding_window", "attention.clamp_kqv", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.temperature_scale", "attention.temperature_length"), (0,)),
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_gating_func"), (0,)),
    **dict.fromkeys(("expert_feed_forward_length", "expert_shared_feed_forward_length"), (0,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"), (0,)),
    **dict.fromkeys(("embedding_length_per_layer_input", "embedding_length_out", "adapters.count"), (0,)),
    **dict.fromkeys(("moe_every_n_layers", "interleave_moe_layer_step", "full_attention_interval"), (0,)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("use_parallel_residual", "swin_norm"), (False,)),
    "rope.dimension_sections": ([0, 0, 0, 0],),
}
"""Keys that a family does not read, and the values that disable them."""


def read_gguf_config(path: Path, overrides: dict[str, Any], model_impl: str = "auto") -> ModelArch:
    """Return the arch of a GGUF model; `overrides` replace top-level keys of the equivalent config.json.

    Raises:
        ModelLoadError: a file is missing, malformed or lacks a key; the message names file, key and what is allowed.
        UnsupportedModelError: quire does not implement the architecture, a key or an option.
    """
    model = GgufModel(path)
    row = architecture_of(model)
    stated_pooling(model)
    values = with_overrides(_of_the_file(model) | row.config(model), overrides)
    arch = read_config(JsonObject(str(path), values, refused=[]), model_impl)
    _refuse_unknown_keys(model)
    sampling = model.about("general.sampling").with_aliases(_SAMPLING)
    return replace(_as_stored(arch, model, row), generation=sampling_defaults(sampling))


def architecture_of(model: GgufModel) -> GgufArchitecture:
    """Return the row of a model's architecture; raises UnsupportedModelError if there is none."""
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model.path}: general.architecture is {model.architecture!r}, which quire does not read from GGUF; "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model.architecture]


def _of_the_file(model: GgufModel) -> dict[str, Any]:
    """Return the config.json keys that do not come from the architecture's keys."""
    about = model.about("tokenizer.ggml")
    return {
        "vocab_size": _vocab_size(model, about),
        "dtype": _dtype(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "eos_token_id": _ends(about),
        "bos_token_id": about.get("bos_token_id"),
        **({"is_causal": causal} if (causal := model.own.flag("attention.causal", True)) is False else {}),
    }


def _vocab_size(model: GgufModel, about: JsonObject) -> int:
    if "token_embd.weight" not in model.tensors:
        raise ModelLoadError(f"{model.path}: tensor 'token_embd.weight' is missing")
    rows = model.tensors["token_embd.weight"][1].shape[0]
    count = len(about.texts("tokens")) if "tokens" in about else 0
    if count > rows:
        raise ModelLoadError(
            f"{model.path}: tokenizer.ggml.tokens has {count} tokens, and token_embd.weight {rows} rows"
        )
    return rows


def _ends(about: JsonObject) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and those known by their text."""
    named = [about.get(key) for key in _ENDS if key in about]
    tokens = about.texts("tokens") if "tokens" in about else ()
    known = _HARMONY_ENDS if "<|return|>" in tokens else _TURN_ENDS
    found = [tokens.index(text) for text in known if text in tokens]
    return list(dict.fromkeys([*named, *found]))


def _dtype(model: GgufModel) -> str:
    """Return the dtype of most of the weights' bytes."""
    sizes: Counter[str] = Counter()
    for _, entry in model.tensors.values():
        sizes[_DTYPES.get(entry.type.name, _QUANTIZED_DTYPE)] += entry.end - entry.start
    return sizes.most_common(1)[0][0]


def _refuse_unknown_keys(model: GgufModel) -> None:
    unread = model.own.values.keys() - model.own.asked - set(_SAY_NOTHING)
    unknown = sorted(key for key in unread if model.own.get(key) not in _OFF.get(key, ()))
    if unknown:
        raise UnsupportedModelError(
            f"{model.own.where}: {', '.join(unknown)}: quire does not support these keys for this architecture"
        )


def _as_stored(arch: ModelArch, model: GgufModel, row: GgufArchitecture) -> ModelArch:
    """Return the arch adapted to the file's tensors: names, and stacked experts."""
    unused = [*arch.names.unused, *(f"^{name}$" for name in (FREQUENCIES, *FACTORS))]
    unused += [
        rf"^(model\.layers|blk)\.{arch.num_layers + layer}\." for layer in range(num_mtp_layers(model))
    ]
    names = CheckpointNames(
        merged=arch.names.merged if row.apart is None else row.apart, unused=tuple(unused)
    )
    experts = arch.experts and replace(
        arch.experts,
        stack=ExpertStack(),
        correction_bias=arch.experts.correction_bias and CORRECTION_BIAS,
        correction_is_row=False,
    )
    delta = arch.delta and replace(
        arch.delta, grouped=False, steps_grouped=arch.delta.grouped, in_turn=row.in_turn
    )
    latent = arch.latent and replace(arch.latent, absorbed=True)
    rope = arch.rope and replace(arch.rope, interleaved=row.interleaved)
    return replace(
        arch,
        model_type=model.architecture,
        names=names,
        experts=experts,
        delta=delta,
        latent=latent,
        rope=rope,
        qk_norm=_NORMS_TOGETHER.get(arch.qk_norm or "", arch.qk_norm),
        quantization=_encodings(model, row),
        **row.fields,
    )


def _encodings(model: GgufModel, row: GgufArchitecture) -> CheckpointQuantization | None:
    """Return which modules have which ggml type; one rule per type, as sparse models have very many modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for name, (_, entry) in model.tensors.items():
        if entry.type.is_quantized:
            modules[entry.type.name].append(place_of(name, row.places).module)
    rules = tuple(
        EncodingRule("|".join(names), Encoding("ggml", {"type": kind})) for kind, names in modules.items()
    )
    return CheckpointQuantization("gguf", rules) if rules else None
