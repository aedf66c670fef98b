# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints whose encoder reads an image, with processor and tokenizer, and what transformers makes of
them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import models, pre_tokenizers

VOCAB, START, PAD, END, TASK = 96, 2, 1, 2, 90
_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "is_decoder": True,
    "add_cross_attention": True,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}
_EYES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
_SWIN = {
    "image_size": [44, 56],
    "patch_size": 4,
    "embed_dim": 12,
    "depths": [2, 3],
    "num_heads": [2, 4],
    "window_size": 3,
}


def _trocr(eyes: str, eyes_options: dict[str, Any], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        encoder = getattr(transformers, f"{eyes}Config")(**_EYES, **eyes_options)
        decoder = transformers.TrOCRConfig(**_SIZES, **options)
        both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        return transformers.VisionEncoderDecoderModel(both)

    return make


def _donut() -> Any:
    encoder = transformers.DonutSwinConfig(**_SWIN)
    decoder = transformers.MBartConfig(**_SIZES, is_encoder_decoder=False, scale_embedding=True)
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.VisionEncoderDecoderModel(both)


MODELS: dict[str, Callable[[], Any]] = {
    "trocr": _trocr("ViT", {"qkv_bias": False}, cross_attention_hidden_size=24),
    "trocr-small": _trocr(
        "DeiT",
        {},
        cross_attention_hidden_size=24,
        use_learned_position_embeddings=False,
        layernorm_embedding=False,
        scale_embedding=True,
        activation_function="relu",
        tie_word_embeddings=False,
    ),
    "trocr-projected": _trocr("ViT", {}),
    "donut": _donut,
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "trocr": ("vit", {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}),
    "trocr-small": (
        "deit",
        {
            "image_processor_type": "DeiTImageProcessor",
            "size": {"height": 36, "width": 36},
            "crop_size": {"height": 32, "width": 32},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
    "donut": (
        "donut",
        {
            "image_processor_type": "DonutImageProcessor",
            "size": {"height": 44, "width": 56},
            "do_align_long_axis": True,
        },
    ),
}
PROCESSORS["trocr-projected"] = PROCESSORS["trocr"]
WORDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, TASK)}}


def save(name: str, path: Path) -> Any:
    """Write a checkpoint with its processor and tokenizer; return the model."""
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_norm = "norm" in parameter_name
            mean = 1.0 if is_norm and parameter_name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1 if is_norm else 0.3)
    model.tie_weights()
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name][1]))
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<s_task>"])
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def picture(seed: int, width: int = 50, height: int = 30) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels_of(name: str, image: Image.Image) -> Any:
    """Return the pixel values of transformers' Pillow processor."""
    module, options = PROCESSORS[name]
    kind = options["image_processor_type"]
    place = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    own = {option: value for option, value in options.items() if option != "image_processor_type"}
    return getattr(place, f"{kind}Pil")(**own)(image, return_tensors="pt")["pixel_values"]


@torch.inference_mode()
def greedy(
    model: Any, pixels: Any, count: int, start: Sequence[int] = (START,)
) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens behind `start`, and their logprobs."""
    ids, logprobs = list(start), []
    encoded = model.encoder(pixel_values=pixels)
    for _ in range(count):
        logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        best = logits.log_softmax(-1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[len(start) :], logprobs
