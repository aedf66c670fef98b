# SPDX-License-Identifier: Apache-2.0
"""Multimodal checkpoints: their language model as if it were alone, and what the other parts ask of it.

Invariant: torch-free. config.json has the language model's config as a nested object; the reader of the language
model's own family reads that object, so nothing else handles multimodality.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.arch import Multimodal
from quire.models.config_overrides import TEXT, with_overrides
from quire.models.json_object import JsonObject
from quire.models.rope_config import layer_rope, with_kind_renamed
from quire.models.tied_head import TIE
from quire.models.vision_rows import num_rows

FOR_ALL_PARTS = (
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
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
}
"""Prefixes of the language model's tensors, in transformers' layouts (two of them mistakes), and of a model without
head.
"""
AUDIO = "audio_config"
"""Key of the config of an encoder of sounds."""
_AXES = ("frames", "rows", "columns")
MAX_ENCODER_LENGTH = 2**20
T5_TOKENS = 2048
"""Longest input of T5's encoder, and longest output; its config has no limit, and it was trained with 512 or 1024."""
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
class WrappedLanguageModel:
    """Architecture that serves a `model_type`, and sizes that its files may omit, in the order of `_SIZES`."""

    architecture: str
    usual_sizes: tuple[int, ...] = ()
    interleaved: bool = False
    """Sections of rotary angles, if there are some, take turns."""


@dataclass(frozen=True)
class Wrapper:
    """Multimodal architecture and the names of its other parts."""

    architecture: str
    models: str
    """Well-known models, for the docs."""
    others: tuple[str, ...] = field(default=("vision_tower", "multi_modal_projector"))
    inside: Mapping[str, str] = field(default_factory=lambda: _INSIDE)
    """See `Multimodal.inside`."""
    encoder_length: str | int = ""
    """Key of the most rows that the encoder gives to cross-attention, or their number; empty: there is no such."""
    reads_text: bool = False
    """The encoder reads text; the decoder then has as many positions at most."""
    text: str = TEXT
    """Key of the language model's config."""
    reads_images: bool = False
    """The encoder, whose config is under `encoder`, reads an image of one size for cross-attention."""
    of_media: tuple[str, ...] = ()
    """Keys of the language model that hold for prompts with media only, whose spans say the same."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Values that the language model's config lacks."""
    placeholder_ids: frozenset[int] = frozenset()
    """Placeholder tokens that config.json does not name."""
    infix: str = ""
    """See `Multimodal.infix`."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """See `Multimodal.adapters`."""
    shared: tuple[str, ...] = ()
    """Keys of other parts' configs that the reader of the language model reads as well."""
    has_companions: bool = False
    """The language model and the encoder may be in other checkpoints (`quire.models.companions`)."""


_QWEN2, _QWEN3 = WrappedLanguageModel("Qwen2ForCausalLM"), WrappedLanguageModel("Qwen3ForCausalLM")
LANGUAGE_MODELS: dict[str, WrappedLanguageModel] = {
    "cohere2": WrappedLanguageModel("Cohere2ForCausalLM"),
    "gemma": WrappedLanguageModel("GemmaForCausalLM", (256000, 3072, 24576, 28, 16, 16, 8192)),
    "gemma2": WrappedLanguageModel("Gemma2ForCausalLM", (256000, 2304, 9216, 26, 8, 4, 8192)),
    "gemma3_text": WrappedLanguageModel("Gemma3ForCausalLM", (262208, 2304, 9216, 26, 8, 4, 131072)),
    "gemma3n_text": WrappedLanguageModel("Gemma3nForCausalLM"),
    "gemma4_text": WrappedLanguageModel("Gemma4ForCausalLM"),
    "glm4_moe": WrappedLanguageModel("Glm4MoeForCausalLM"),
    "llama": WrappedLanguageModel("LlamaForCausalLM", (32000, 4096, 11008, 32, 32, 32, 2048)),
    "llama4_text": WrappedLanguageModel("Llama4ForCausalLM"),
    "ministral3": WrappedLanguageModel("Ministral3ForCausalLM"),
    "mistral": WrappedLanguageModel("MistralForCausalLM", (32000, 4096, 14336, 32, 32, 8, 131072)),
    "phi4_multimodal": WrappedLanguageModel("Phi3ForCausalLM", (200064, 3072, 8192, 32, 32, 8, 131072)),
    "phi4mm": WrappedLanguageModel("Phi3ForCausalLM"),
    "qwen2": WrappedLanguageModel("Qwen2ForCausalLM", (151936, 4096, 22016, 32, 32, 32, 32768)),
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": WrappedLanguageModel("Qwen3ForCausalLM", interleaved=True),
    "qwen3_5_text": WrappedLanguageModel("Qwen3_5ForCausalLM", interleaved=True),
    "bart": WrappedLanguageModel("BartDecoder"),
    "m2m_100": WrappedLanguageModel("M2M100Decoder"),
    "marian": WrappedLanguageModel("MarianDecoder"),
    "mbart": WrappedLanguageModel("MBartDecoder"),
    "mt5": WrappedLanguageModel("T5Decoder"),
    "pegasus": WrappedLanguageModel("PegasusDecoder"),
    "t5": WrappedLanguageModel("T5Decoder"),
    "trocr": WrappedLanguageModel("TrOCRDecoder"),
    "umt5": WrappedLanguageModel("UMT5Decoder"),
    "whisper": WrappedLanguageModel("WhisperDecoder"),
    "qwen3_5_moe_text": WrappedLanguageModel("Qwen3_5MoeForCausalLM", interleaved=True),
}
"""Language models by `model_type`. In text, the three position ids of Qwen's vision models are equal."""

_DECODER = {
    "model.decoder.": "model.",
    "decoder.": "model.",
    "model.shared.": "model.shared.",
    "shared.": "model.shared.",
}


def _translator(architecture: str, models: str, length: str | int = "max_position_embeddings") -> Wrapper:
    return Wrapper(architecture, models, ("encoder",), _DECODER, length, reads_text=True)


_HEARING = ("audio_tower", "multi_modal_projector")
_GEMMA_PARTS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
_PHI4_ADAPTERS = {"image": "vision-lora", "audio": "speech-lora"}
_LLAVA_NEXT = ("vision_tower", "multi_modal_projector", "image_newline")

WRAPPERS: dict[str, Wrapper] = {
    row.architecture: row
    for row in (
        Wrapper("AyaVisionForConditionalGeneration", "Aya Vision 8B and 32B"),
        _translator("BartForConditionalGeneration", "BART, BART-CNN, DistilBART"),
        Wrapper(
            "DeepseekVLForConditionalGeneration",
            "DeepSeek-VL 1.3B in the form of transformers",
            ("vision_model", "aligner"),
        ),
        Wrapper(
            "Florence2ForConditionalGeneration",
            "Florence-2 in the form of transformers",
            (r"language_model\.encoder", "vision_tower", "multi_modal_projector"),
            {"model.language_model.decoder.": "model.", "model.language_model.shared.": "model.shared."},
            "max_position_embeddings",
            reads_text=True,
            beside={"final_logits_bias": False},
        ),
        Wrapper("Gemma3ForConditionalGeneration", "Gemma 3 4B, 12B and 27B, MedGemma"),
        Wrapper(
            "Gemma3nForConditionalGeneration",
            "Gemma 3n E2B and E4B",
            _GEMMA_PARTS,
            _INSIDE | {f"{name}.": f"model.{name}." for name in ("embed_vision", "embed_audio")},
            shared=("vision_config", "audio_config"),
        ),
        Wrapper(
            "Gemma4ForConditionalGeneration",
            "Gemma 4 E2B, E4B, 26B-A4B and 31B",
            _GEMMA_PARTS,
        ),
        Wrapper("GotOcr2ForConditionalGeneration", "GOT-OCR 2.0 in the form of transformers"),
        Wrapper("Idefics3ForConditionalGeneration", "Idefics 3 8B", ("vision_model", "connector")),
        Wrapper("InternVLForConditionalGeneration", "InternVL 3 and 3.5 in the form of transformers"),
        Wrapper(
            "LightOnOcrForConditionalGeneration", "LightOnOCR 1B", ("vision_encoder", "vision_projection")
        ),
        Wrapper(
            "Llama4ForConditionalGeneration",
            "Llama 4 Scout and Maverick",
            ("vision_model", "multi_modal_projector"),
        ),
        Wrapper("LlavaForConditionalGeneration", "LLaVA 1.5, Pixtral 12B in the form of transformers"),
        Wrapper("LlavaNextForConditionalGeneration", "LLaVA 1.6", _LLAVA_NEXT),
        Wrapper("LlavaOnevisionForConditionalGeneration", "LLaVA-OneVision", _LLAVA_NEXT),
        _translator("M2M100ForConditionalGeneration", "M2M-100, NLLB-200"),
        _translator("MarianMTModel", "OPUS-MT and Tatoeba, by Marian"),
        _translator("MBartForConditionalGeneration", "mBART, mBART-50"),
        Wrapper("MiniCPMV4_6ForConditionalGeneration", "MiniCPM-V 4.6", ("vision_tower", "merger")),
        Wrapper("Mistral3ForConditionalGeneration", "Mistral Small 3.1 and 3.2, Magistral, Ministral 3"),
        _translator("MT5ForConditionalGeneration", "mT5", T5_TOKENS),
        Wrapper(
            "PaliGemmaForConditionalGeneration",
            "PaliGemma, PaliGemma 2",
            of_media=("use_bidirectional_attention",),
        ),
        _translator("PegasusForConditionalGeneration", "Pegasus"),
        Wrapper(
            "Phi4MMForCausalLM",
            "Phi-4-multimodal",
            ("embed_tokens_extend", r".*\.lora_[AB]"),
            {},
            placeholder_ids=frozenset({200010, 200011}),
            infix=".base_layer",
            adapters=_PHI4_ADAPTERS,
        ),
        Wrapper(
            "Phi4MultimodalForCausalLM",
            "the same in the form of transformers",
            ("embed_tokens_extend",),
            {},
            adapters=_PHI4_ADAPTERS,
        ),
        Wrapper("Qwen2_5_VLForConditionalGeneration", "Qwen 2.5 VL", ("visual",)),
        Wrapper("Qwen2AudioForConditionalGeneration", "Qwen 2 Audio 7B", _HEARING),
        Wrapper("Qwen2VLForConditionalGeneration", "Qwen 2 VL", ("visual",)),
        Wrapper("Qwen3_5ForConditionalGeneration", "Qwen 3.5", ("visual",)),
        Wrapper("Qwen3_5MoeForConditionalGeneration", "Qwen 3.5 with experts", ("visual",)),
        Wrapper("Qwen3VLForConditionalGeneration", "Qwen 3 VL 2B to 32B", ("visual",)),
        Wrapper(
            "SmolVLMForConditionalGeneration",
            "SmolVLM, SmolVLM 2 256M to 2.2B",
            ("vision_model", "connector"),
        ),
        _translator("T5ForConditionalGeneration", "T5, T5 1.1, Flan-T5", T5_TOKENS),
        Wrapper(
            "UltravoxModel",
            "Ultravox 0.3 to 0.7",
            (*_HEARING, "vision_tower", "vision_model"),
            has_companions=True,
        ),
        _translator("UMT5ForConditionalGeneration", "UMT5", T5_TOKENS),
        Wrapper("VipLlavaForConditionalGeneration", "ViP-LLaVA 7B and 13B"),
        Wrapper(
            "VisionEncoderDecoderModel",
            "TrOCR, Donut",
            ("encoder", "enc_to_dec_proj"),
            {"decoder.model.decoder.": "model.", "decoder.": ""},
            text="decoder",
            reads_images=True,
        ),
        Wrapper("VoxtralForConditionalGeneration", "Voxtral Mini 3B and Small 24B", _HEARING),
        Wrapper(
            "WhisperForConditionalGeneration",
            "Whisper tiny to large-v3-turbo, Distil-Whisper",
            ("encoder",),
            {"model.decoder.": "model.", "decoder.": "model."},
            "max_source_positions",
        ),
    )
}
"""Wrappers by architecture, in alphabetical order."""


def language_model_of(
    architecture: str, config: JsonObject, overrides: Mapping[str, Any]
) -> tuple[JsonObject, Multimodal | None]:
    """Return the language model's config as if it were alone, and the wrapper; `config` and None if there is no
    wrapper.

    `overrides` are the user's top-level keys, which refer to the language model.

    Raises:
        ModelLoadError: the object is malformed.
        UnsupportedModelError: the language model is unknown.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None:
        return config, None
    # Qwen's early vision models have the keys of all parts in one object.
    text = config.child(wrapper.text) if wrapper.text in config else config
    kind = text.text("model_type")
    if kind not in LANGUAGE_MODELS:
        raise text.unsupported("model_type", f"one of {', '.join(LANGUAGE_MODELS)}")
    values = _values(config, text, LANGUAGE_MODELS[kind], decides=wrapper.text == TEXT)
    values = {key: value for key, value in values.items() if key not in wrapper.of_media}
    of_text = {key: value for key, value in overrides.items() if key not in ("architectures", wrapper.text)}
    values = with_overrides(values, of_text)
    alone = JsonObject(text.where, values, refused=config.refused)
    others = "|".join(wrapper.others)
    unused = (rf"^(model\.)*({others})(\.|$)",)
    eyes = config.child("vision_config")
    alone = alone.with_values(**wrapper.beside, **{key: config.get(key) for key in wrapper.shared})
    length = _encoder_length(config, text, wrapper)
    if wrapper.reads_images:
        alone = alone.with_values(max_source_positions=length)
    parts = (config, text, eyes, config.child(AUDIO))
    part_of = Multimodal(
        architecture,
        wrapper.inside,
        unused,
        wrapper.placeholder_ids.union(*map(_placeholder_ids, parts)),
        json.dumps(dict(config.values)),
        _sections(text),
        LANGUAGE_MODELS[kind].interleaved,
        eyes.number("tokens_per_second", 1.0),
        len(eyes.get("deepstack_visual_indexes") or ()),
        length,
        wrapper.reads_text,
        _decoder_length(alone, wrapper, length),
        wrapper.reads_images,
        infix=wrapper.infix,
        adapters=wrapper.adapters,
    )
    return with_kind_renamed(alone, {"mrope": "default"}), part_of


def _decoder_length(decoder: JsonObject, wrapper: Wrapper, encoder_length: int) -> int:
    if wrapper.reads_images:
        return decoder.integer("max_position_embeddings", 1024)
    return encoder_length if wrapper.reads_text else 0


def _encoder_length(config: JsonObject, text: JsonObject, wrapper: Wrapper) -> int:
    if wrapper.reads_images:
        return num_rows(config.child("encoder"))
    said = wrapper.encoder_length
    if isinstance(said, int):
        return said
    source = config if said in config else text
    return source.integer(said, 1024, high=MAX_ENCODER_LENGTH) if said else 0


def _sections(text: JsonObject) -> tuple[int, ...]:
    """Return the angles that frames, rows and columns rotate; empty if a token has one position."""
    rope = layer_rope(text)
    if "mrope_section" not in rope:
        return ()
    sections = tuple(map(int, rope.numbers("mrope_section")))
    if len(sections) != len(_AXES):
        raise rope.wrong("mrope_section", f"a list of {len(_AXES)} numbers, for {', '.join(_AXES)}")
    return sections


def _placeholder_ids(config: JsonObject) -> frozenset[int]:
    found = (config.get(f"{kind}_{what}") for kind in _MEDIA for what in ("token_id", "token_index"))
    return frozenset(token_id for token_id in found if type(token_id) is int and token_id >= 0)


def _values(
    config: JsonObject, text: JsonObject, known: WrappedLanguageModel, *, decides: bool
) -> dict[str, Any]:
    """Return the values of a config.json for the language model alone.

    `decides`: the whole model's value says whether the tables are tied, whatever the nested config says; otherwise the
    language model has tables of its own.
    """
    sizes = dict(zip(_SIZES, known.usual_sizes, strict=False))
    otherwise = sizes | {key: config.get(key) for key in FOR_ALL_PARTS}
    absent = {key: value for key, value in otherwise.items() if key not in text}
    tie = {TIE: config.get(TIE)} if TIE in config and decides else {}
    return {**text.values, **absent, **tie, "architectures": [known.architecture]}
