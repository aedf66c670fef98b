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
        processor: subclass of `quire.multimodal.processors.base.Processor`; numpy and Pillow only. Empty if the tower
            reads text.
        tower: computes embeddings from the processor's arrays; empty if none is implemented.
        images, videos, sounds: how one becomes placeholders, for the docs; empty: the family takes none.
    """

    processor: str
    tower: str = ""
    images: str = ""
    videos: str = ""
    sounds: str = ""


_PROCESSORS = "quire.multimodal.processors"
_TOWERS = "quire.multimodal.towers"
_QWEN_IMAGES = "one run of rows x columns / 4 patches, between vision markers"
_QWEN_VIDEOS = "one run over pairs of frames"
_QWEN3 = Family(
    f"{_PROCESSORS}.qwen_video:Qwen3VLProcessor",
    f"{_TOWERS}.qwen_vl:Qwen3VLTower",
    images=_QWEN_IMAGES,
    videos="a run for each pair of frames, after its time",
)
_TILES = "tiles with markers of row and column, the whole image last"

_PHI4 = Family(
    f"{_PROCESSORS}.phi4:Phi4Processor",
    f"{_TOWERS}.phi4:Phi4Tower",
    images="one run: up to 36 crops in rows with separators, the whole image last",
    sounds="one run of 12.5 tokens a second",
)
HOSTED = Family(
    "quire.multimodal.hosted.processor:HostedProcessor",
    "quire.multimodal.hosted.tower:HostedTower",
    images="as transformers writes them; its modules are the processor and the encoder (extra `hf`)",
)
"""Family whose processor and encoder are transformers' own, if the installed one has its class."""
_BART, _T5 = Family("", f"{_TOWERS}.text:BartTower"), Family("", f"{_TOWERS}.text:T5Tower")

FAMILIES: dict[str, Family] = {
    "AyaVisionForConditionalGeneration": HOSTED,
    "BartForConditionalGeneration": _BART,
    "DeepseekVLForConditionalGeneration": HOSTED,
    "Florence2ForConditionalGeneration": Family(
        f"{_PROCESSORS}.florence:FlorenceProcessor",
        f"{_TOWERS}.davit:FlorenceTower",
        images="one run of fixed length before the encoder's text",
    ),
    "Gemma3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.gemma3:Gemma3Processor",
        f"{_TOWERS}.vit:Gemma3Tower",
        images="one run of fixed length, seen both ways",
    ),
    "Gemma3nForConditionalGeneration": Family(
        f"{_PROCESSORS}.gemma3n:Gemma3nProcessor",
        f"{_TOWERS}.gemma3n:Gemma3nTower",
        images="one run of 256 tokens between markers",
        sounds="one run of 188 tokens between markers, at most 30 s",
    ),
    "Gemma4ForConditionalGeneration": Family(
        f"{_PROCESSORS}.gemma4:Gemma4Processor",
        f"{_TOWERS}.gemma4:Gemma4Tower",
        images="one run of up to 70 to 1120 tokens, as asked, between markers",
        videos="an image's run for each frame, of up to 70 tokens, after its time",
        sounds="one run of 25 tokens a second between markers, at most 30 s (E2B, E4B)",
    ),
    "GotOcr2ForConditionalGeneration": HOSTED,
    "Idefics3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.idefics3:Idefics3Processor", f"{_TOWERS}.vit:Idefics3Tower", images=_TILES
    ),
    "InternVLForConditionalGeneration": Family(
        f"{_PROCESSORS}.internvl:InternVLProcessor",
        f"{_TOWERS}.vit:InternVLTower",
        images="one run over up to 12 tiles and a thumbnail",
    ),
    "LightOnOcrForConditionalGeneration": HOSTED,
    "Llama4ForConditionalGeneration": Family(
        f"{_PROCESSORS}.llama4:Llama4Processor",
        f"{_TOWERS}.llama4:Llama4Tower",
        images="a run for each of up to 16 tiles with separators, the whole image last",
    ),
    "LlavaForConditionalGeneration": Family(
        f"{_PROCESSORS}.llava:LlavaProcessor",
        f"{_TOWERS}.vit:LlavaTower",
        images="one run of fixed length; rows with breaks for Pixtral",
    ),
    "LlavaNextForConditionalGeneration": Family(
        f"{_PROCESSORS}.llava_next:LlavaNextProcessor",
        f"{_TOWERS}.llava_next:LlavaNextTower",
        images="one run: the whole image, then its tiles in rows",
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        f"{_PROCESSORS}.llava_next:LlavaOnevisionProcessor",
        f"{_TOWERS}.llava_next:LlavaOnevisionTower",
        images="one run: the whole image, then its tiles in rows",
        videos="one run over pooled frames",
    ),
    "M2M100ForConditionalGeneration": _BART,
    "MarianMTModel": _BART,
    "MBartForConditionalGeneration": _BART,
    "MiniCPMV4_6ForConditionalGeneration": Family(
        f"{_PROCESSORS}.minicpmv:MiniCPMVProcessor",
        f"{_TOWERS}.minicpmv:MiniCPMVTower",
        images="the whole image, then up to 9 slices in rows, each a run between markers",
        videos="each frame as an image, one after another",
    ),
    "Mistral3ForConditionalGeneration": Family(
        f"{_PROCESSORS}.pixtral:PixtralProcessor",
        f"{_TOWERS}.pixtral:Mistral3Tower",
        images="rows of patches, each ended by a break token",
    ),
    "MT5ForConditionalGeneration": _T5,
    "PaliGemmaForConditionalGeneration": Family(
        f"{_PROCESSORS}.llava:PaliGemmaProcessor",
        f"{_TOWERS}.vit:PaliGemmaTower",
        images="one run of fixed length; the whole prompt is seen both ways",
    ),
    "PegasusForConditionalGeneration": _BART,
    "Phi4MMForCausalLM": _PHI4,
    "Phi4MultimodalForCausalLM": _PHI4,
    "Qwen2AudioForConditionalGeneration": Family(
        f"{_PROCESSORS}.sound:Qwen2AudioProcessor",
        f"{_TOWERS}.sound:Qwen2AudioTower",
        sounds="one run of 25 tokens a second, at most 30 s",
    ),
    "Qwen2VLForConditionalGeneration": Family(
        f"{_PROCESSORS}.qwen_video:Qwen2VLProcessor",
        f"{_TOWERS}.qwen_vl:QwenVLTower",
        images=_QWEN_IMAGES,
        videos=_QWEN_VIDEOS,
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        f"{_PROCESSORS}.qwen_video:Qwen25VLProcessor",
        f"{_TOWERS}.qwen_vl:Qwen25VLTower",
        images=_QWEN_IMAGES,
        videos=_QWEN_VIDEOS,
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN3,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3,
    "SmolVLMForConditionalGeneration": Family(
        f"{_PROCESSORS}.idefics3:Idefics3Processor", f"{_TOWERS}.vit:Idefics3Tower", images=_TILES
    ),
    "T5ForConditionalGeneration": _T5,
    "UltravoxModel": Family(
        f"{_PROCESSORS}.ultravox:UltravoxProcessor",
        f"{_TOWERS}.ultravox:UltravoxTower",
        sounds="one run of 6.25 tokens a second, in windows of 30 s",
    ),
    "UMT5ForConditionalGeneration": _T5,
    "VipLlavaForConditionalGeneration": HOSTED,
    "VisionEncoderDecoderModel": Family(
        f"{_PROCESSORS}.whole:WholeImageProcessor",
        f"{_TOWERS}.vit:EncoderTower",
        images="none: it fills positions before the decoder's prompt",
    ),
    "VoxtralForConditionalGeneration": Family(
        f"{_PROCESSORS}.sound:VoxtralProcessor",
        f"{_TOWERS}.sound:VoxtralTower",
        sounds="a begin token and one run of 375 tokens for each 30 s begun",
    ),
    "WhisperForConditionalGeneration": Family(
        "quire.multimodal.towers.whisper:Spectrograms", f"{_TOWERS}.whisper:WhisperTower"
    ),
}
"""Architecture -> family, in alphabetical order."""
