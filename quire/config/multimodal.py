# SPDX-License-Identifier: Apache-2.0
"""Images, videos, sounds and embeddings as inputs (see multimodal.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option

GIB = 2**30


MAX_ITEMS = 999
"""Inputs of a kind in a prompt where nothing else is said."""


@dataclass(frozen=True)
class MultimodalConfig(Config):
    """Images, videos, sounds and embeddings as inputs (see multimodal.md)."""

    language_model_only: bool = option(
        False, "Serve only the language model of a multimodal checkpoint; its other parts are not loaded."
    )
    limit_mm_per_prompt: dict[str, Any] = option(
        {},
        'Most items of each kind (image, video, audio) in a prompt, as JSON: {"image": 4}; 0 refuses a kind. '
        "Default: 999 of each.",
        metavar="JSON",
    )
    mm_processor_kwargs: dict[str, Any] = option(
        {}, 'Options of the image processor, as JSON: {"max_pixels": 1003520}.', metavar="JSON"
    )
    allowed_local_media_path: str = option(
        "", "Directory below which file:// URLs of media are read. Default: none is read.", metavar="DIR"
    )
    allowed_media_domains: tuple[str, ...] = option(
        (), "Hosts from which http(s) URLs of media are fetched. Default: none.", metavar="HOST"
    )
    mm_processor_cache_gb: float = option(
        1.0, "GiB of processed images kept in the temporary folder for later requests.", ge=0.0, metavar="GIB"
    )
    enable_mm_embeds: bool = option(False, "Accept embeddings of images in place of the images.")
    enable_prompt_embeds: bool = option(False, "Accept prompts that are embeddings.")
    encoder_cache_gb: float = option(
        1.0, "GiB of host memory for embeddings of images, those in use included.", gt=0.0, metavar="GIB"
    )
    mmproj: str = option(
        "",
        "GGUF file with the image encoder of a model in GGUF. Default: the mmproj*.gguf beside it, if there is one.",
        metavar="FILE",
    )
    max_encoder_slice_ms: float = option(
        30.0,
        "Most milliseconds that an image encoder computes between two steps, and at most 3/4 of the last step's time.",
        gt=0.0,
        metavar="MS",
    )

    def most_items(self, kind: str) -> int:
        """Return the most inputs of a kind that a prompt may have."""
        said = self.limit_mm_per_prompt.get(kind, MAX_ITEMS)
        return int(said.get("count", MAX_ITEMS) if isinstance(said, dict) else said)

    @property
    def processor_cache_bytes(self) -> int:
        """Limit of the processed images, in bytes."""
        return int(self.mm_processor_cache_gb * GIB)

    @property
    def encoder_cache_bytes(self) -> int:
        """Limit of the embeddings, in bytes."""
        return int(self.encoder_cache_gb * GIB)
