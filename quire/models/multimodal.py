"""Checkpoints of models that take more than text, of which the language model is served.

Invariant: torch-free. config.json describes the language model in an object of its own; what is read is that object, as
the reader of the language model's own family does, so nothing else knows that there is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.arch import Multimodal
from quire.models.config_overrides import TEXT, with_overrides
from quire.models.json_object import JsonObject
from quire.models.rope_config import with_kind_renamed
from quire.models.tied_head import TIE

_FOR_ALL_PARTS = (
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "compression_config",
)
"""Keys that some files have once for all parts."""
_INSIDE = {
    **dict.fromkeys(("model.language_model.model.", "language_model.model.model."), "model."),
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""How tensors of the language model begin, by the layouts of transformers (two of them written by mistake), and of a
model without its head."""
_MEDIA = ("image", "video", "audio")  # keys such as image_token_id, or image_token_index in older files
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class LanguageModel:
    """What a `model_type` is served as, and the sizes that its files may leave out, in the order of `_SIZES`."""

    architecture: str
    usual_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wrapper:
    """An architecture with more than a language model, and what it calls its other parts."""

    architecture: str
    models: str
    """What it is known for, for people."""
    others: tuple[str, ...] = field(default=("vision_tower", "multi_modal_projector"))


_QWEN2, _QWEN3 = LanguageModel("Qwen2ForCausalLM"), LanguageModel("Qwen3ForCausalLM")
LANGUAGE_MODELS: dict[str, LanguageModel] = {
    "gemma3_text": LanguageModel("Gemma3ForCausalLM", (262208, 2304, 9216, 26, 8, 4, 131072)),
    "gemma3n_text": LanguageModel("Gemma3nForCausalLM"),
    "gemma4_text": LanguageModel("Gemma4ForCausalLM"),
    "llama": LanguageModel("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, 32, 2048)),
    "llama4_text": LanguageModel("Llama4ForCausalLM"),
    "ministral3": LanguageModel("Ministral3ForCausalLM"),
    "mistral": LanguageModel("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072)),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_5_text": LanguageModel("Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": LanguageModel("Qwen3_5MoeForCausalLM"),
}
"""By `model_type`. A token of a text has one position, so the three that Qwen's vision models give it are that one."""

WRAPPERS: dict[str, Wrapper] = {
    row.architecture: row
    for row in (
        Wrapper("Gemma3ForConditionalGeneration", "Gemma 3 4B, 12B and 27B, MedGemma"),
        Wrapper(
            "Gemma3nForConditionalGeneration",
            "Gemma 3n E2B and E4B",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Gemma4ForConditionalGeneration",
            "Gemma 4, by transformers' code",
            ("vision_tower", "audio_tower", "embed_vision", "embed_audio"),
        ),
        Wrapper(
            "Llama4ForConditionalGeneration",
            "Llama 4 Scout and Maverick",
            ("vision_model", "multi_modal_projector"),
        ),
        Wrapper("LlavaForConditionalGeneration", "LLaVA 1.5, Pixtral 12B in the form of transformers"),
        Wrapper("Mistral3ForConditionalGeneration", "Mistral Small 3.1 and 3.2, Magistral, Ministral 3"),
        Wrapper("Qwen2_5_VLForConditionalGeneration", "Qwen 2.5 VL", ("visual",)),
        Wrapper("Qwen2VLForConditionalGeneration", "Qwen 2 VL", ("visual",)),
        Wrapper("Qwen3_5ForConditionalGeneration", "Qwen 3.5", ("visual",)),
        Wrapper("Qwen3_5MoeForConditionalGeneration", "Qwen 3.5 with experts", ("visual",)),
        Wrapper("Qwen3VLForConditionalGeneration", "Qwen 3 VL 2B to 32B", ("visual",)),
    )
}
"""By architecture, in the order of the alphabet."""


def language_model_of(
    architecture: str, config: JsonObject, overrides: Mapping[str, Any]
) -> tuple[JsonObject, Multimodal | None]:
    """The object that describes the language model as if it were alone, and what it is part of; else `config`, None.

    `overrides` are top-level keys that a user gave, who means the language model.

    Raises:
        ModelLoadError: the object is malformed.
        UnsupportedModelError: the language model is none that is known.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return config, None
    # Qwen's early vision models have the keys of all parts side by side.
    text = config.child(TEXT) if TEXT in config else config
    kind = text.text("model_type")
    if kind not in LANGUAGE_MODELS:
        raise text.unsupported("model_type", f"one of {', '.join(LANGUAGE_MODELS)}")
    values = _values(config, text, LANGUAGE_MODELS[kind])
    of_text = {key: value for key, value in overrides.items() if key not in ("architectures", TEXT)}
    values = with_overrides(values, of_text)
    alone = JsonObject(text.where, values, refused=config.refused)
    others = "|".join(wrapper.others)
    unused = (rf"^(model\.)*({others})(\.|$)",)
    part_of = Multimodal(architecture, _INSIDE, unused, _placeholder_ids(config) | _placeholder_ids(text))
    return with_kind_renamed(alone, {"mrope": "default"}), part_of


def _placeholder_ids(config: JsonObject) -> frozenset[int]:
    found = (config.get(f"{kind}_{what}") for kind in _MEDIA for what in ("token_id", "token_index"))
    return frozenset(token_id for token_id in found if type(token_id) is int and token_id >= 0)


def _values(config: JsonObject, text: JsonObject, known: LanguageModel) -> dict[str, Any]:
    """What a config.json of the language model alone would say."""
    sizes = dict(zip(_SIZES, known.usual_sizes, strict=False))
    otherwise = sizes | {key: config.get(key) for key in _FOR_ALL_PARTS}
    absent = {key: value for key, value in otherwise.items() if key not in text}
    # The tables that are tied are the whole model's, whatever it says of this part of it.
    tie = {TIE: config.get(TIE)} if TIE in config else {}
    return {**text.values, **absent, **tie, "architectures": [known.architecture]}
