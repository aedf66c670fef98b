"""How weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class LoadConfig(Config):
    """Format and place of the weights."""

    load_format: str = option(
        "auto",
        "auto or safetensors: the checkpoint's safetensors files; dummy: random weights made from config.json.",
        choices=("auto", "safetensors", "dummy"),
    )
    download_dir: str | None = option(
        None, "Where Hugging Face downloads are kept; default: the hub's cache."
    )
    packed_weights_cache: str | None = option(
        None, "Directory in which weights are kept as the kernels want them; the next start maps them."
    )
