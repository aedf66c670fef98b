# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint directory without weights, for engines whose executor is `null`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.engine.slow_schedulers import HELD

CORPUS = ["the quick brown fox jumps over the lazy dog", "größe, naïveté, 你好, привет, 😀👍🏽"] * 4
EOS = "<|end|>"


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 300 tokens with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


@pytest.fixture(scope="session", autouse=True)
def held_cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Name the file that holds the cores of `run_all`; their processes inherit it."""
    os.environ[HELD] = str(tmp_path_factory.mktemp("held") / "cores")
    yield
    del os.environ[HELD]


@pytest.fixture(scope="session")
def null_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and a tokenizer; nothing could be loaded from it but nothing has to be."""
    directory = tmp_path_factory.mktemp("null-model")
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
