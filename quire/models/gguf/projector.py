# SPDX-License-Identifier: Apache-2.0
"""Image encoders in GGUF (`mmproj` files), as the other parts of the equivalent checkpoint of transformers.

Invariant: torch-free. Processors and towers see a checkpoint's files only: this module writes down what these would
say, and where the tensors are. A key or a tensor that no row reads is refused: it may change the computation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config.arch import ModelArch, Multimodal
from quire.config.multimodal import MultimodalConfig
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.gguf.model import SUFFIX, GgufModel, choose_projector, is_gguf, is_projector
from quire.models.gguf.shapes import TensorPlace, TensorPlaces

logger = logging.getLogger(__name__)

ENCODER = "clip"
"""Architecture of all such files."""
FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""Weights of a patch's two frames, which checkpoints have in one tensor."""
PLUS_ONE = "plus_one"
_MAX_BLOCKS = 1000
_IDLE = ("projection_dim", "image_crop_resolution", "image_resize_algo")
"""Keys without effect: tensors imply them, or other parts of the file say the same."""
_FLAT = ("flat", "")
_BLOCK = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_out": "out_proj"}
_LEGACY_TOKEN = "unknown_token_id"
"""Key of the token that stands for an image if the vocabulary has none of its own: text never becomes it."""


@dataclass(frozen=True)
class Projector:
    """Image encoder of a file.

    Args:
        config: config.json of the whole model, without its language model.
        image: preprocessor_config.json.
        tokens: name of a token in processor_config.json -> its text.
        places: of all tensors, by name without its ending.
        out: tensor whose side has the size of the language model's stream, and that side.
        made: further names of tensors, which are put together from several.
        may_lack: an image takes the place of any token if the vocabulary has none of this name.
    """

    config: dict[str, Any]
    image: dict[str, Any]
    tokens: Mapping[str, str]
    places: TensorPlaces
    out: tuple[str, int]
    made: tuple[str, ...] = ()
    may_lack: bool = False
    sees_three_axes: bool = False
    processor: dict[str, Any] = field(default_factory=dict)


class _Encoder:
    """Metadata of a file's encoder."""

    def __init__(self, model: GgufModel) -> None:
        self.model = model
        self.own = model.about(f"{ENCODER}.vision")
        whole = model.about(ENCODER)
        self.kind = self.own.text("projector_type", whole.text("projector_type", "mlp"))
        used = [name for name in ("gelu", "silu") if whole.flag(f"use_{name}", False)]
        self.activation = {"gelu": "gelu_pytorch_tanh", "silu": "silu"}[used[0]] if used else "quick_gelu"
        self.width = self.own.integer("embedding_length")
        self.blocks = self.own.integer("block_count", high=_MAX_BLOCKS)
        self.image = self.own.integer("image_size", 0, low=0)
        self.patch = self.own.integer("patch_size")
        self.inner = self.own.integer("feed_forward_length", 0, low=0)
        self.heads = self.own.integer("attention.head_count")
        self.eps = self.own.number("attention.layer_norm_epsilon", 1e-6)

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    @property
    def pixels(self) -> dict[str, Any]:
        """Mean and deviation of the colors."""
        return {key: list(self.own.numbers(key)) for key in ("image_mean", "image_std") if key in self.own}

    def mlp(self, first: str, second: str) -> dict[str, str]:
        """Return the places of a block's MLP, whose two names older converters confused."""
        up = self.model.tensors.get("v.blk.0.ffn_up.weight")
        is_confused = up is not None and up[1].shape[0] == self.width != up[1].shape[-1]
        names = ("ffn_down", "ffn_up") if is_confused else ("ffn_up", "ffn_down")
        return dict(zip(names, (first, second), strict=True))

    def of_blocks(self, at: str, inner: Mapping[str, str]) -> dict[str, str]:
        """Return the places of all blocks."""
        return {
            f"v.blk.{number}.{name}": f"{at}.{number}.{place}"
            for number in range(self.blocks)
            for name, place in inner.items()
        }

    def vit(self, at: str) -> dict[str, str | TensorPlace]:
        """Return the places of a vision transformer's tensors."""
        block = {name: f"self_attn.{place}" for name, place in _BLOCK.items()}
        block |= {"ln1": "layer_norm1", "ln2": "layer_norm2"} | self.mlp("mlp.fc1", "mlp.fc2")
        return {
            "v.class_embd": f"{at}.embeddings.class_embedding",
            "v.patch_embd": f"{at}.embeddings.patch_embedding",
            "v.position_embd": f"{at}.embeddings.position_embedding",
            "v.pre_ln": f"{at}.pre_layrnorm",
            "v.post_ln": f"{at}.post_layernorm",
            **self.of_blocks(f"{at}.encoder.layers", block),
        }

    def sizes(self, model_type: str) -> dict[str, Any]:
        """Return the vision_config of a vision transformer."""
        return {
            "model_type": model_type,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "image_size": self.image,
            "patch_size": self.patch,
            "layer_norm_eps": self.eps,
            "hidden_act": self.activation,
        }


def _llava(encoder: _Encoder) -> Projector:
    """LLaVA: the file ends with the last block that is read."""
    encoder.own.only("mm_patch_merge_type", *_FLAT)
    encoder.own.get("image_grid_pinpoints")
    encoder.own.only("feature_layer", [encoder.blocks])
    is_clip = encoder.has("v.class_embd")
    side = encoder.image
    sizes: dict[str, Any] = {"height": side, "width": side}
    image = {
        "image_processor_type": "CLIPImageProcessor" if is_clip else "SiglipImageProcessor",
        "size": {"shortest_edge": side} if is_clip else sizes,
        **({"crop_size": sizes} if is_clip else {}),
    }
    return Projector(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": encoder.sizes("clip_vision_model" if is_clip else "siglip_vision_model"),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default" if is_clip else "full",
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": encoder.has("mm.0.bias"),
        },
        image | encoder.pixels,
        {"image_token": "<image>"},
        {
            **encoder.vit("vision_tower"),
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        ("mm.2.weight", 0),
        may_lack=True,
    )


def _gemma3(encoder: _Encoder) -> Projector:
    merge = encoder.own.integer("projector.scale_factor", 4)
    side = encoder.image
    return Projector(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": encoder.sizes("siglip_vision_model"),
            "mm_tokens_per_image": (side // encoder.patch // merge) ** 2,
        },
        {"size": {"height": side, "width": side}, **encoder.pixels},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {
            **encoder.vit("vision_tower"),
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": TensorPlace("multi_modal_projector.mm_soft_emb_norm", made_by=PLUS_ONE),
        },
        ("mm.input_projection.weight", 1),
    )


def _idefics3(encoder: _Encoder) -> Projector:
    merge = encoder.own.integer("projector.scale_factor", 2)
    longest = encoder.own.integer("preproc_image_size", 4 * encoder.image)
    return Projector(
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "vision_config": encoder.sizes("idefics3_vision"),
            "scale_factor": merge,
        },
        {
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": encoder.image},
            **encoder.pixels,
        },
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
        {**encoder.vit("vision_model"), "mm.model.fc": "connector.modality_projection.proj"},
        ("mm.model.fc.weight", 0),
        processor={"image_seq_len": (encoder.image // encoder.patch // merge) ** 2},
    )


def _qwen(
    encoder: _Encoder, architecture: str, sizes: Mapping[str, Any], mlp: Mapping[str, str]
) -> Projector:
    merge = encoder.own.integer("spatial_merge_size", 2)
    limits = {
        name: encoder.own.integer(f"image_{name}", usual)
        for name, usual in (("min_pixels", 56 * 56), ("max_pixels", 28 * 28 * 16384))
    }
    block = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj", "attn_qkv": "attn.qkv", **mlp}
    block |= {f"attn_{part}": f"attn.{part}" for part in "qkv"}
    return Projector(
        {
            "architectures": [architecture],
            "vision_config": {
                "depth": encoder.blocks,
                "num_heads": encoder.heads,
                "patch_size": encoder.patch,
                "spatial_merge_size": merge,
                "temporal_patch_size": len(FRAMES),
                "hidden_act": encoder.activation,
                "qkv_apart": not encoder.has("v.blk.0.attn_qkv.weight"),
                **sizes,
            },
        },
        {
            "patch_size": encoder.patch,
            "merge_size": merge,
            "temporal_patch_size": len(FRAMES),
            "size": {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]},
            **encoder.pixels,
        },
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        {
            **encoder.of_blocks("visual.blocks", block),
            "v.post_ln": "visual.merger.ln_q",
            "mm.0": "visual.merger.mlp.0",
            "mm.2": "visual.merger.mlp.2",
        },
        ("mm.2.weight", 0),
        made=("visual.patch_embed.proj.weight",),
        sees_three_axes=True,
    )


def _qwen2(encoder: _Encoder) -> Projector:
    inner = encoder.inner or 4 * encoder.width
    sizes = {"embed_dim": encoder.width, "mlp_ratio": inner / encoder.width}
    return _qwen(encoder, "Qwen2VLForConditionalGeneration", sizes, encoder.mlp("mlp.fc1", "mlp.fc2"))


def _qwen25(encoder: _Encoder) -> Projector:
    period = encoder.own.integer("n_wa_pattern", high=_MAX_BLOCKS)
    sizes = {
        "hidden_size": encoder.width,
        "intermediate_size": encoder.inner,
        "window_size": encoder.own.integer("window_size", 112),
        "fullatt_block_indexes": list(range(period - 1, encoder.blocks, period)),
        "tokens_per_second": 2,
    }
    mlp = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return _qwen(encoder, "Qwen2_5_VLForConditionalGeneration", sizes, mlp)


KINDS: dict[str, Callable[[_Encoder], Projector]] = {
    "mlp": _llava,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "qwen2vl_merger": _qwen2,
    "qwen2.5vl_merger": _qwen25,
}
"""Value of `clip.projector_type` -> reader."""


def read_projector(path: Path) -> Projector:
    """Return the encoder of a file.

    Raises:
        ModelLoadError: the file is missing or malformed, or holds something else.
        UnsupportedModelError: quire does not compute this kind, or a key or a tensor of it.
    """
    model = GgufModel(path)
    if model.architecture != ENCODER:
        raise ModelLoadError(
            f"{path}: general.architecture is {model.architecture!r}; --mmproj takes a file of {ENCODER!r}"
        )
    encoder = _Encoder(model)
    if encoder.kind not in KINDS:
        raise UnsupportedModelError(
            f"{path}: projector_type is {encoder.kind!r}; quire computes {', '.join(KINDS)}"
        )
    found = KINDS[encoder.kind](encoder)
    for place in (".weight", ".bias"):
        known = {name.removesuffix(place) for name in model.tensors if name.endswith(place)}
        _refuse(path, "tensor", known - found.places.keys() - _stems(found, place))
    _refuse(path, "key", {*encoder.own.values} - encoder.own.asked - {*_IDLE})
    return found


def _stems(found: Projector, ending: str) -> set[str]:
    """Return the tensors without an ending that have a place in full, or are put together."""
    full = {name.removesuffix(ending) for name in found.places if name.endswith(ending)}
    return full | ({FRAMES[0].removesuffix(ending)} if found.made else set())


def _refuse(path: Path, kind: str, unknown: set[str]) -> None:
    if unknown:
        raise UnsupportedModelError(
            f"{path}: {kind} {', '.join(sorted(unknown)[:4])}: quire does not support it for this encoder"
        )


def projector_of(model_path: Path, options: MultimodalConfig) -> Path | None:
    """Return the file with a GGUF model's encoder: the named one, or the one beside it; None if there is none.

    Raises:
        ConfigError: a file is named for a model that is not in GGUF.
    """
    if options.mmproj:
        if not is_gguf(model_path):
            raise ConfigError(
                "--mmproj belongs to a model in GGUF, and other checkpoints have their encoder inside"
            )
        return Path(options.mmproj).expanduser()
    if not is_gguf(model_path):
        return None
    found = choose_projector(names := [str(path) for path in sorted(model_path.parent.glob(f"*{SUFFIX}"))])
    if found is None and any(is_projector(Path(name).name) for name in names):
        logger.warning("several image encoders beside the model, none of them is used: name one by --mmproj")
    return None if found is None else Path(found)


def with_projector(arch: ModelArch, model_path: Path, options: MultimodalConfig) -> ModelArch:
    """Return the arch of a model in GGUF as part of the one that sees, if it has an encoder.

    A file that is only found beside the model, and does not fit it, costs the images alone.

    Raises:
        ConfigError, ModelLoadError, UnsupportedModelError: the file that --mmproj names cannot be used.
    """
    path = None if options.language_model_only else projector_of(model_path, options)
    if path is None:
        return arch
    try:
        return _joined(arch, GgufModel(model_path), path)
    except (ModelLoadError, UnsupportedModelError) as error:
        if options.mmproj:
            raise
        logger.warning("the model is served for text only: %s", error)
        return arch


def _joined(arch: ModelArch, model: GgufModel, path: Path) -> ModelArch:
    found = read_projector(path)
    name, side = found.out
    tensors = GgufModel(path).tensors
    size = tensors[name][1].shape[side] if name in tensors else None
    if size != arch.hidden_size:
        raise ModelLoadError(
            f"{path}: its embeddings have the size {size}, and those of {model.path.name} have {arch.hidden_size}: "
            "they are of different models"
        )
    tokens, ids = _tokens(found, model)
    sections = model.own.get("rope.dimension_sections") if found.sees_three_axes else ()
    files = {
        "config.json": found.config,
        "preprocessor_config.json": found.image,
        "processor_config.json": found.processor | tokens,
    }
    part_of = Multimodal(
        found.config["architectures"][0],
        {},
        (),
        ids,
        json.dumps(found.config),
        tuple(sections or ())[:3],
        tokens_per_second=found.config["vision_config"].get("tokens_per_second", 1.0),
        projector=str(path),
        processor_files=json.dumps(files),
    )
    return replace(arch, part_of=part_of)


def _tokens(found: Projector, model: GgufModel) -> tuple[dict[str, str], frozenset[int]]:
    """Return the texts of the tokens that processors write, and the ids of those whose place an image takes."""
    about = model.about("tokenizer.ggml")
    vocabulary = about.texts("tokens") if "tokens" in about else ()
    ids = {text: token_id for token_id, text in enumerate(vocabulary)}
    texts = dict(found.tokens)
    if found.may_lack and texts["image_token"] not in ids:
        other = about.integer(_LEGACY_TOKEN, 0, low=0)
        texts["image_token"] = vocabulary[other] if other < len(vocabulary) else texts["image_token"]
    for text in texts.values():
        if text not in ids:
            raise UnsupportedModelError(
                f"{model.path}: its vocabulary has no token {text!r}, which an image needs"
            )
    return texts, frozenset(ids[text] for key, text in texts.items() if key in ("image_token", "video_token"))
