# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of random weights for a directory that has a config.json alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quire import LLM


@contextmanager
def engine_of(model: Path) -> Iterator[LLM]:
    """Make an engine with random weights, in bfloat16 and without a tokenizer."""
    llm = LLM(
        str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        kv_cache_memory_bytes=2**27,
    )
    try:
        yield llm
    finally:
        llm.shutdown()


def tensors_of(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """Return random tensors with the names and shapes that transformers gives a model with this config."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=draw)
        for name, tensor in empty.state_dict().items()
        if name not in tied
    }


def write_checkpoint(model: Path, place: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint with the config of another directory; returns its place."""
    place.mkdir(parents=True)
    for path in model.glob("*.json"):
        shutil.copy(path, place)
    save_file(tensors, place / "model.safetensors")
    return place
