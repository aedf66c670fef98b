"""Which model, in which precision, and how its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, option

DEMO_MODEL, DEMO_EMBEDDER, DEMO_COMPANION = "quire-demo", "quire-demo-embed", "quire-demo-draft"
IN_THE_BOX = (DEMO_MODEL, DEMO_EMBEDDER, DEMO_COMPANION)
"""Models that come with quire."""


@dataclass(frozen=True)
class ModelConfig(Config):
    """The model and what bounds its requests."""

    model: str = option(
        DEMO_MODEL,
        "Directory, GGUF file, Hugging Face id (of GGUF owner/name:Q4_K_M), or a toy in the box: "
        "quire-demo, quire-demo-embed, quire-demo-draft.",
    )
    tokenizer: str | None = option(None, "Directory or id of the tokenizer; default: the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face id.")
    served_model_name: tuple[str, ...] = option((), "Names under which the server offers the model.")
    runner: str = option(
        "auto",
        "What the model does: generate tokens, or make numbers of prompts (pooling); auto: what it was made for.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = option(
        "auto",
        "What a pooling model is made into: embed, classify or reward; auto: what its checkpoint says; none: as it is.",
        choices=("auto", "none", "embed", "classify", "reward"),
    )
    pooler_config: dict[str, Any] = option(
        {}, 'JSON object over what the checkpoint says of its pooling, e.g. {"pooling_type": "MEAN"}.'
    )
    io_processor_plugin: str | None = option(
        None,
        "Plug-in that reads requests and writes replies of its own around a pooling model (docs/plugins.md).",
        metavar="NAME",
    )
    model_impl: str = option(
        "auto",
        "Whose code computes the model: quire's, the installed transformers', or (auto) quire's where it has some.",
        choices=("auto", "quire", "transformers"),
    )
    dtype: str = option(
        "auto",
        "Precision of the weights; auto: the checkpoint's where its kernels exist. Activations are float32 on a CPU.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
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
        "What logprobs are: the model's own (raw) or those that the choice is made from, as logprobs or logits.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    logits_processors: tuple[str, ...] = option(
        (),
        "Logits processors for all requests, each as module:Class (see quire.logits_processors).",
        places=True,
    )
    reasoning_start_str: str = option(
        "", "What opens a section of reasoning; empty: <think>, if that is a token of the model."
    )
    reasoning_end_str: str = option(
        "", "What closes a section of reasoning; empty: </think>, if that is a token of the model."
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
