# SPDX-License-Identifier: Apache-2.0
"""quire's reading of GGUF against llama.cpp's tokens, as recorded by `benchmarks.compare.gguf_tokens`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.tokenizer import Tokenizer
from tests.fixtures.llama_cpp import (
    FAMILIES,
    FORMATS,
    answers_of,
    digest_of,
    digests,
    recorded,
    texts_for,
    tokenizers,
    write_model,
    write_tokenizer,
)
from tests.models.harness import load_tiny, logits_of

TOLERANCE = 2e-2
AGAIN = "not the file that llama.cpp was asked about: run python -m benchmarks.compare.gguf_tokens --record"


def test_record_names_its_llama_cpp_version() -> None:
    assert recorded()["llama-cpp-python"] == "0.3.36"


@pytest.mark.parametrize("mode", ["precise", pytest.param("fast", marks=pytest.mark.more)])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logits(family: str, form: str, mode: str, tmp_path: Path) -> None:
    path = write_model(family, form, tmp_path / "model.gguf")
    theirs = answers_of(f"{family}-{form}")
    assert digest_of(path) == theirs.digest, AGAIN
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(theirs.prompts, theirs.tokens, strict=True)]
    model = load_tiny(path, max_model_len=64, quantization_config={"mode": mode})
    for ours, prompt, tokens, logits in zip(
        logits_of(model, sequences, chunk_sizes=[9]),
        theirs.prompts,
        theirs.tokens,
        theirs.logits,
        strict=True,
    ):
        behind = ours[len(prompt) - 1 : -1]
        assert behind.argmax(dim=-1).tolist() == tokens
        if mode == "precise":
            torch.testing.assert_close(behind[0], torch.tensor(logits), rtol=0.0, atol=TOLERANCE)


QUICK = ("pieces", "llama-bpe", "qwen2")


@pytest.mark.parametrize(
    ("name", "kind", "keys"),
    [
        pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.more, id=each[0])
        for each in tokenizers()
    ],
)
def test_tokens_of_texts(name: str, kind: str, keys: dict[str, object], tmp_path: Path) -> None:
    record = recorded()
    ours = Tokenizer.from_dir(
        write_tokenizer(kind, record["vocabularies"][kind], keys, tmp_path / "vocabulary.gguf")
    )
    texts = texts_for(name)
    found = digests([ours.encode(text) for text in texts])
    unlike = [
        index for index, pair in enumerate(zip(found, record["ids"][name], strict=True)) if len(set(pair)) > 1
    ]
    assert not unlike, [texts[10 * index : 10 * index + 10] for index in unlike[:2]]
