# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of published models in GGUF, against the known answers in the repository of llama.cpp.

The files are in the source package of llama-cpp-python; `docs/quantization.md` says where they must lie.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine.tokenizer import Tokenizer

MODELS = Path(os.environ.get("QUIRE_REAL", "build/real")) / "llama.cpp" / "models"
NAMES = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
COMPOSED = {"qwen35": 3}
"""Texts that the models' own tokenizers bring into NFC first, as ours does, and llama.cpp does not."""
pytestmark = pytest.mark.real


@pytest.mark.parametrize("name", NAMES)
def test_gguf_vocabulary_matches_known_answers(name: str) -> None:
    path = MODELS / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    tokenizer = Tokenizer.from_dir(path)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    answers = [[int(item) for item in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    wrong = [(text, ours, own) for text, ours, own in zip(texts, found, answers, strict=False) if ours != own]
    assert len(wrong) == COMPOSED.get(name, 0), wrong[:3]


@pytest.mark.parametrize("name", ["aquila", "baichuan", "gpt-neox", "nomic-bert-moe"])
def test_gguf_vocabulary_without_answers_round_trips(name: str) -> None:
    path = MODELS / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is missing")
    tokenizer = Tokenizer.from_dir(path)
    text = "Hello world, 3 tests"
    assert tokenizer.decode(tokenizer.encode(text)).strip() == text
