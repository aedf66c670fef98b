# SPDX-License-Identifier: Apache-2.0
"""Table of multimodal families: processor of images and tower of each, by the checkpoint's architecture.

Invariant: torch-free; classes are named, and imported by whoever needs one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Classes of one family, as "module:Class".

    Args:
        processor: subclass of `quire.multimodal.processors.base.Processor`; numpy and Pillow only.
        tower: computes embeddings from the processor's arrays; empty if none is implemented.
        images: how an image becomes placeholders, for the docs.
    """

    processor: str
    tower: str = ""
    images: str = ""


_PROCESSORS = "quire.multimodal.processors"
_TOWERS = "quire.multimodal.towers"
_QWEN = f"{_PROCESSORS}.qwen_vl:QwenVLProcessor"
_QWEN_IMAGES = "one run of rows x columns / 4 patches, between vision markers"
_TILES = "tiles with markers of row and column, the whole image last"

FAMILIES: dict[str, Family] = {
    "Gemma3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.gemma3:Gemma3Processor",
        f"{_TOWERS}.vit:Gemma3Tower",
        images="one run of fixed length, seen both ways",
    ),
    "Idefics3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.idefics3:Idefics3Processor", f"{_TOWERS}.vit:Idefics3Tower", images=_TILES
    ),
    "InternVLForConditionalGeneration": Family(
        f"{_PROCESSORS}.internvl:InternVLProcessor",
        f"{_TOWERS}.vit:InternVLTower",
        images="one run over up to 12 tiles and a thumbnail",
    ),
    "LlavaForConditionalGeneration": Family(
        f"{_PROCESSORS}.llava:LlavaProcessor",
        f"{_TOWERS}.vit:LlavaTower",
        images="one run of fixed length; rows with breaks for Pixtral",
    ),
    "Mistral3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.pixtral:PixtralProcessor",
        f"{_TOWERS}.pixtral:Mistral3Tower",
        images="rows of patches, each ended by a break token",
    ),
    "Qwen2VLForConditionalGeneration": Family(_QWEN, f"{_TOWERS}.qwen_vl:QwenVLTower", images=_QWEN_IMAGES),
    "Qwen2_5_VLForConditionalGeneration": Family(
        _QWEN, f"{_TOWERS}.qwen_vl:Qwen25VLTower", images=_QWEN_IMAGES
    ),
    "Qwen3VLForConditionalGeneration": Family(_QWEN, f"{_TOWERS}.qwen_vl:Qwen3VLTower", images=_QWEN_IMAGES),
    "Qwen3_5ForConditionalGeneration": Family(_QWEN, f"{_TOWERS}.qwen_vl:Qwen3VLTower", images=_QWEN_IMAGES),
    "Qwen3_5MoeForConditionalGeneration": Family(
        _QWEN, f"{_TOWERS}.qwen_vl:Qwen3VLTower", images=_QWEN_IMAGES
    ),
    "SmolVLMForConditionalGeneration": Family(
        f"{_PROCESSORS}.idefics3:Idefics3Processor", f"{_TOWERS}.vit:Idefics3Tower", images=_TILES
    ),
    "WhisperForConditionalGeneration": Family(
        "quire.multimodal.towers.whisper:Spectrograms", f"{_TOWERS}.whisper:WhisperTower"
    ),
}
"""Architecture -> family, in alphabetical order."""
