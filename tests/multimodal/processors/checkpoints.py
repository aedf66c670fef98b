# SPDX-License-Identifier: Apache-2.0
"""Directories with a processor's files, and transformers' Pillow processor made from the same options."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.multimodal.processors.base import Processor, make_processor


@dataclass(frozen=True)
class Case:
    """Checkpoint of one family, as small as its sizes may be."""

    architecture: str
    oracle: Callable[[], Any]
    image: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    """Options that transformers' processor gives its image processor."""
    ratio: float = 1e9
    """Limit of one side over the other."""

    def write(self, directory: Path, *, inside: bool = False) -> Path:
        """Write the files, the image processor's inside the processor's if `inside`."""
        config = {"architectures": [self.architecture], **self.config}
        files = {
            "config.json": config,
            "processor_config.json": self.processor,
            "preprocessor_config.json": self.image,
        }
        if inside:
            files["processor_config.json"] = {
                **self.processor,
                "image_processor": files.pop("preprocessor_config.json"),
            }
        for name, values in files.items():
            (directory / name).write_text(json.dumps(values))
        return directory

    def read(self, directory: Path, **options: Any) -> Processor:
        processor = make_processor(self.architecture, self.write(directory), options)
        assert processor is not None
        return processor


def _pil(module: str, name: str) -> Callable[[], Any]:
    def load() -> Any:
        return getattr(
            importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), name
        )

    return load


def _on_torchvision() -> Any:
    """Stand for a class that cannot be made without torchvision; a test of its own has other means."""
    return None


_CLIP = {"model_type": "clip_vision_model", "image_size": 42, "patch_size": 14}
_QWEN = {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 40}}

_PINPOINTS = [[42 * rows, 42 * columns] for rows in range(1, 5) for columns in range(1, 5)]

_TROCR = {"encoder": {"model_type": "vit", "image_size": 32, "patch_size": 8}}

CASES: dict[str, Case] = {
    "trocr": Case(
        "VisionEncoderDecoderModel",
        _pil("vit", "ViTImageProcessorPil"),
        {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": 32, "width": 32},
            "do_convert_rgb": True,
        },
        _TROCR,
    ),
    "trocr-small": Case(
        "VisionEncoderDecoderModel",
        _pil("deit", "DeiTImageProcessorPil"),
        {
            "image_processor_type": "DeiTImageProcessor",
            "size": {"height": 36, "width": 40},
            "crop_size": {"height": 32, "width": 32},
            "do_convert_rgb": True,
        },
        {"encoder": {**_TROCR["encoder"], "model_type": "deit"}},
    ),
    "florence": Case(
        "Florence2ForConditionalGeneration",
        _pil("clip", "CLIPImageProcessorPil"),
        {"size": {"height": 48, "width": 40}, "do_center_crop": False},
        {
            "vision_config": {
                "patch_size": [7, 3],
                "patch_stride": [4, 2],
                "patch_padding": [3, 1],
            }
        },
    ),
    **{
        f"donut{name}": Case(
            "VisionEncoderDecoderModel",
            _pil("donut", "DonutImageProcessorPil"),
            {"size": {"height": 40, "width": 56}, "do_convert_rgb": True, **options},
            {
                "encoder": {
                    "model_type": "donut-swin",
                    "image_size": [40, 56],
                    "depths": [1, 1],
                    "num_heads": [1, 1],
                }
            },
            ratio=40,
        )
        for name, options in (("", {}), ("-turned", {"do_align_long_axis": True, "resample": 3}))
    },
    "llama4": Case(
        "Llama4ForConditionalGeneration",
        _on_torchvision,
        {"size": {"height": 28, "width": 28}},
        {"vision_config": {"patch_size": 14}},
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        _pil("clip", "CLIPImageProcessorPil"),
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 42},
            "crop_size": {"height": 42, "width": 42},
        },
        {"vision_config": _CLIP},
    ),
    "llava-crop": Case(
        "LlavaForConditionalGeneration",
        _pil("clip", "CLIPImageProcessorPil"),
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 37},
            "crop_size": {"height": 42, "width": 56},
        },
        {"vision_config": _CLIP, "vision_feature_select_strategy": "full"},
    ),
    "llava-padded": Case(
        "LlavaForConditionalGeneration",
        _pil("llava", "LlavaImageProcessorPil"),
        {
            "image_processor_type": "LlavaImageProcessor",
            "do_pad": True,
            "size": {"shortest_edge": 42},
            "crop_size": {"height": 42, "width": 42},
        },
        {"vision_config": _CLIP},
        ratio=100,
    ),
    "llava-siglip": Case(
        "LlavaForConditionalGeneration",
        _pil("siglip", "SiglipImageProcessorPil"),
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 42, "width": 42}},
        {
            "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava-next": Case(
        "LlavaNextForConditionalGeneration",
        _pil("llava_next", "LlavaNextImageProcessorPil"),
        {
            "size": {"shortest_edge": 42},
            "crop_size": {"height": 42, "width": 42},
            "image_grid_pinpoints": [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]],
        },
        {"vision_config": _CLIP},
        ratio=40,
    ),
    "llava-onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        _pil("llava_onevision", "LlavaOnevisionImageProcessorPil"),
        {"size": {"height": 42, "width": 42}, "image_grid_pinpoints": _PINPOINTS},
        {
            "vision_config": {**_CLIP, "model_type": "siglip_vision_model"},
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        ratio=40,
    ),
    "qwen2-vl": Case(
        "Qwen2_5_VLForConditionalGeneration", _pil("qwen2_vl", "Qwen2VLImageProcessorPil"), _QWEN, ratio=200
    ),
    "qwen3-vl": Case(
        "Qwen3VLForConditionalGeneration",
        _pil("qwen2_vl", "Qwen2VLImageProcessorPil"),
        {
            "size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 40},
            "patch_size": 16,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        ratio=200,
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        _pil("gemma3", "Gemma3ImageProcessorPil"),
        {"size": {"height": 56, "width": 56}, "do_convert_rgb": True},
        {"mm_tokens_per_image": 4},
    ),
    "gemma3-crops": Case(
        "Gemma3ForConditionalGeneration",
        _pil("gemma3", "Gemma3ImageProcessorPil"),
        {
            "size": {"height": 56, "width": 56},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 40,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
        {"mm_tokens_per_image": 4},
    ),
    "phi4": Case(
        "Phi4MultimodalForCausalLM",
        _on_torchvision,
        {"image_processor_type": "Phi4MultimodalImageProcessor", "size": {"height": 56, "width": 56}},
    ),
    "gemma4": Case(
        "Gemma4ForConditionalGeneration",
        _pil("gemma4", "Gemma4ImageProcessorPil"),
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2, "do_normalize": False},
        {"text_config": {"use_bidirectional_attention": "vision"}},
        {"video_processor": {"patch_size": 4, "pooling_kernel_size": 2}},
    ),
    "minicpmv": Case(
        "MiniCPMV4_6ForConditionalGeneration",
        _pil("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
        {"scale_resolution": 112, "patch_size": 14, "max_slice_nums": 9},
        processor={"use_image_id": False},
        ratio=40,
    ),
    "paligemma": Case(
        "PaliGemmaForConditionalGeneration",
        _pil("siglip", "SiglipImageProcessorPil"),
        {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 16,
        },
        {"vision_config": {"image_size": 56, "patch_size": 14}},
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        _pil("smolvlm", "SmolVLMImageProcessorPil"),
        {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
        processor={"image_seq_len": 4},
    ),
    "idefics3-whole": Case(
        "Idefics3ForConditionalGeneration",
        _pil("idefics3", "Idefics3ImageProcessorPil"),
        {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False},
        {"vision_config": {"image_size": 28, "patch_size": 7}, "scale_factor": 2},
    ),
    "pixtral": Case(
        "LlavaForConditionalGeneration",
        _pil("pixtral", "PixtralImageProcessorPil"),
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}},
        {"vision_config": {"patch_size": 8}},
        {"patch_size": 8},
        {"patch_size": 8},
        ratio=96,
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        _pil("pixtral", "PixtralImageProcessorPil"),
        {"size": {"longest_edge": 112}, "patch_size": {"height": 7, "width": 7}},
        {"vision_config": {"patch_size": 7}, "spatial_merge_size": 2},
        call={"patch_size": 14},
        ratio=112,
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        _pil("got_ocr2", "GotOcr2ImageProcessorPil"),
        {"size": {"height": 28, "width": 28}, "min_patches": 1, "max_patches": 12, "crop_to_patches": False},
        {"image_seq_length": 4},
        call={"crop_to_patches": True},
    ),
}
