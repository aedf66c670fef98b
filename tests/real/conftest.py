# SPDX-License-Identifier: Apache-2.0
"""Real weights, tokenizers and templates: where they lie, and transformers' view of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.real.fetch import folder

GGUF = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}


@pytest.fixture(scope="session")
def real() -> Callable[[str], Path]:
    """Folder of something that `tests.real.fetch` has fetched; a test of what could not be had is skipped."""

    def found(name: str) -> Path:
        path = folder() / name
        if not path.exists():
            pytest.skip(f"{path} is not there: python -m tests.real.fetch")
        return path

    return found


@pytest.fixture(scope="session")
def in_floats(real: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory with a GGUF file's weights in float32, as transformers dequantizes them, and its tokenizer."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            from transformers import AutoTokenizer, GgufConfig

            source = real(name)
            made[name] = tmp_path_factory.mktemp(name)
            floats = GgufConfig(dequantize=True)
            oracle(source, gguf_file=GGUF[name], quantization_config=floats).save_pretrained(made[name])
            AutoTokenizer.from_pretrained(source, gguf_file=GGUF[name]).save_pretrained(made[name])
        return made[name]

    return directory


def oracle(directory: Path, **options: Any) -> Any:
    """Return transformers' language model in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    return model.eval()
