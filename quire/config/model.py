# SPDX-License-Identifier: Apache-2.0
"""Model, precision and weight loading; LoRA (see lora.md); structured outputs (see structured_output.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError
from quire.structured_outputs_params import StructuredOutputsSettings


@dataclass(frozen=True)
class LoRAConfig(Config):
    """LoRA adapters that requests may name (see lora.md)."""

    enable_lora: bool = option(False, "Serve low-rank adapters (LoRA) beside the model.")
    max_loras: int = option(
        1, "Different adapters in one step; each takes memory of the device.", ge=1, le=256
    )
    max_lora_rank: int = option(16, "Largest rank of an adapter.", ge=1, le=512)
    max_cpu_loras: int | None = option(
        None, "Adapters kept in the host's memory, at least --max-loras. Default: as many as that.", ge=1
    )

    lora_dtype: str = option(
        "auto",
        "Dtype of adapters' weights; auto: as the model's; int8 takes half of bfloat16's memory.",
        choices=("auto", "float32", "float16", "bfloat16", "int8"),
    )
    lora_extra_vocab_size: int = option(
        256, "Most tokens that an adapter may add to the embedding and the head; 0: none.", ge=0, le=4096
    )
    default_mm_loras: dict[str, Any] = option(
        {},
        'Adapters of prompts with media, by kind, as JSON: {"image": "DIRECTORY"}. Default: those in the checkpoint.',
        metavar="JSON",
    )

    @property
    def num_kept(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or self.max_loras

    def check(self) -> None:
        """Reject contradictory limits.

        Raises:
            ConfigError: names the flag and the limit.
        """
        if self.num_kept < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.num_kept}, but --max-loras {self.max_loras} needs at least as many"
            )


@dataclass(frozen=True)
class StructuredOutputsConfig(Config):
    """Constraints on generated text: JSON schemas, expressions, grammars (see structured_output.md)."""

    structured_outputs_config: dict[str, Any] = option(
        {}, 'JSON object such as {"disable_any_whitespace": true}; all keys are in structured_output.md.'
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _parse(self.structured_outputs_config)

    @property
    def settings(self) -> StructuredOutputsSettings:
        """Parsed keys with their types and defaults."""
        return _parse(self.structured_outputs_config)


def _parse(value: dict[str, Any]) -> StructuredOutputsSettings:
    try:
        return msgspec.convert(value, StructuredOutputsSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--structured-outputs-config: {error}") from None


DEMO_MODEL, DEMO_EMBEDDER, DEMO_COMPANION = "quire-demo", "quire-demo-embed", "quire-demo-draft"
DEMO_VISION = "quire-demo-vision"
ASSETS = Path(__file__).parents[1] / "assets"  # Directory of the bundled models.
BUNDLED_MODELS = (DEMO_MODEL, DEMO_VISION, DEMO_EMBEDDER, DEMO_COMPANION)  # Models bundled with quire.


@dataclass(frozen=True)
class ModelConfig(Config):
    """The model and what bounds its requests."""

    model: str = option(
        DEMO_MODEL,
        "Directory, GGUF file, Hugging Face id (of GGUF owner/name:Q4_K_M), or an included toy: quire-demo, "
        "or that with -vision, -embed or -draft.",
    )
    tokenizer: str | None = option(None, "Directory or id of the tokenizer; default: the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face id.")
    served_model_name: tuple[str, ...] = option((), "Names under which the server offers the model.")
    runner: str = option(
        "auto",
        "Use of the model: generate tokens, or pool prompts (embeddings, classes, ...); auto: what it was made for.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "Conversion of a pooling model: embed, classify or reward; auto: what its checkpoint says; none: as it is.",
        choices=("auto", "none", "embed", "classify", "reward"),
    )
    pooler_config: dict[str, Any] = option(
        {}, 'JSON object merged over the pooling settings of the checkpoint, e.g. {"pooling_type": "MEAN"}.'
    )
    io_processor_plugin: str | None = option(
        None,
        "Plug-in that reads requests and writes replies of its own around a pooling model (docs/plugins.md).",
        metavar="NAME",
    )
    model_impl: str = option(
        "auto",
        "Implementation of the model: quire's, the installed transformers', or (auto) quire's if there is one.",
        choices=("auto", "quire", "transformers"),
    )
    dtype: str = option(
        "auto",
        "Precision of the weights; auto: the checkpoint's where its kernels exist. Activations are float32 on a CPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        elsewhere=tuple(
            (name, f"weights are rounded by --quantization {name}") for name in ("int8", "int4", "fp8")
        ),
    )
    seed: int = option(0, "Seeds requests that bring no seed of their own, in order of arrival.", ge=0)
    max_model_len: int = option(
        0,
        "Longest prompt plus output, in tokens; 0: what the model was made for; auto or -1: as much of that as fits "
        "into memory.",
        ge=-1,
        words=(("auto", -1),),
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: the whole vocabulary.", ge=-1)
    logprobs_mode: str = option(
        "raw_logprobs",
        "Reported logprobs: the model's own (raw) or those that are sampled from (processed), as logprobs or logits.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    logits_processors: tuple[str, ...] = option(
        (),
        "Logits processors for all requests, each as module:Class (see quire.logits_processors).",
        places=True,
    )
    reasoning_start_str: str = option(
        "", "Text that opens a reasoning section; empty: <think>, if that is a token of the model."
    )
    reasoning_end_str: str = option(
        "", "Text that closes a reasoning section; empty: </think>, if that is a token of the model."
    )
    skip_tokenizer_init: bool = option(False, "Work on token ids only: no tokenizer is loaded.")
    hf_overrides: dict[str, Any] = option({}, "JSON object merged over the model's config.json.")
    generation_config: str = option(
        "auto",
        "Where default sampling parameters come from: auto (the model's), quire (ours), or a directory.",
    )
    override_generation_config: dict[str, Any] = option(
        {}, 'JSON object merged over the generation config, e.g. {"temperature": 0.5}.'
    )


@dataclass(frozen=True)
class LoadConfig(Config):
    """Format and place of the weights."""

    load_format: str = option(
        "auto",
        "auto: what the model has; safetensors or gguf: these alone; dummy: random weights made from config.json.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    download_dir: str | None = option(
        None, "Where Hugging Face downloads are kept; default: the hub's cache."
    )
    packed_weights_cache: str | None = option(
        None,
        "Directory in which packed weights are kept for later starts to map; default: ~/.cache/quire/packed.",
    )
    packed_weights_cache_gib: float = option(
        20.0, "Most GiB of packed weights that are kept; the least recently used ones are deleted.", gt=0
    )
    enable_packed_weights_cache: bool = option(
        True, "Keep packed weights on disk (CPU only), so that later starts map them."
    )
