# SPDX-License-Identifier: Apache-2.0
"""Encoders, by the whole engine core: what transformers gives, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.errors import StartupError
from quire.kernels import cpu
from quire.kernels.cpu.sized_graph import SizedGraph, StepSize
from quire.pooling_params import PoolingParams
from tests.fixtures.pooled import pool, pooling_core
from tests.fixtures.tiny_encoders import TINY_ENCODERS, encoder_oracle
from tests.models.test_encoders import assert_close, texts

TEXTS, TOKENS = "ForSequenceClassification", "ForTokenClassification"
SOME: list[Any] = ["bert", "modernbert", "embedding-gemma"]
OF_EACH_FORM = (*SOME, "modernbert-texts", "roberta-tokens", "nomic-mlm", "jina-v3")
"""That the numbers of each are transformers' says tests/models/test_encoders.py."""
OTHERS = sorted(TINY_ENCODERS.keys() - {*SOME})


@torch.inference_mode()
def expected_of(oracle: Any, architecture: str, text: list[int], **inputs: Tensor) -> Tensor:
    """Means of length 1 of a text, its classes, or those of its tokens."""
    given = oracle(torch.tensor([text]), output_hidden_states=True, **inputs)
    if architecture.endswith((TEXTS, TOKENS)):
        classes: Tensor = torch.softmax(given.logits[0].double(), -1).float()
        return classes
    last = given.hidden_states[-1] if architecture.endswith("ForMaskedLM") else given.last_hidden_state
    return nn.functional.normalize(last[0].mean(0), dim=0)


@pytest.mark.parametrize(
    "name",
    [name if name in OF_EACH_FORM else pytest.param(name, marks=pytest.mark.every) for name in TINY_ENCODERS],
)
def test_encoder_matches_transformers(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    directory, tiny = tiny_encoder(name), TINY_ENCODERS[name]
    oracle, batch = encoder_oracle(name, directory), texts()
    core = pooling_core(directory)
    together = pool(core, batch)
    for text, numbers in zip(batch, together, strict=True):
        assert_close(torch.tensor(numbers), expected_of(oracle, tiny.architecture, text))
    if cpu.available():  # sums of the reference depend on how a batch is cut
        few = pooling_core(directory, max_num_seqs=2)
        for others in (pool(core, batch, together=False), pool(few, batch[::-1])[::-1]):
            assert [one.tobytes() for one in others] == [one.tobytes() for one in together]


@pytest.mark.parametrize("name", ["bert", "nomic"])
def test_second_texts_have_tokens_of_their_own(name: str, tiny_encoder: Callable[[str], Path]) -> None:
    directory, batch, seconds = tiny_encoder(name), texts((9, 30, 12)), [4, 20, None]
    oracle = encoder_oracle(name, directory)
    given = pool(pooling_core(directory), batch, second_text_starts=seconds)
    for text, second, numbers in zip(batch, seconds, given, strict=True):
        types = torch.tensor([[int(second is not None and place >= second) for place in range(len(text))]])
        expected = expected_of(oracle, "BertModel", text, token_type_ids=types)
        assert_close(torch.tensor(numbers), expected)
    alone = pooling_core(directory)
    for _ in range(2):
        found = pool(alone, batch, second_text_starts=seconds, together=False)
        assert [one.tobytes() for one in found] == [one.tobytes() for one in given]


@pytest.mark.skipif(not cpu.available(), reason="graphs are of C++ kernels")
@pytest.mark.parametrize("name", SOME + [pytest.param(name, marks=pytest.mark.more) for name in OTHERS])
def test_small_steps_are_recorded_and_replayed(
    name: str, tiny_encoder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of any length have the bits that they have without graphs."""
    directory, batch, played = tiny_encoder(name), texts((9, 14, 6, 9, 14)), list[StepSize]()
    replay = SizedGraph.replay
    monkeypatch.setattr(SizedGraph, "replay", lambda graph, size: played.append(size) or replay(graph, size))
    plain, replayed = pooling_core(directory, max_num_seqs=2, enforce_eager=True), pooling_core(directory)
    expected = [one.tobytes() for one in pool(plain, batch, together=False)]
    assert not played
    assert [one.tobytes() for one in pool(replayed, batch, together=False)] == expected
    assert played == [(1, len(text)) for text in batch]
    pairs = pooling_core(directory, max_num_seqs=2)
    for one, other in ((0, 1), (1, 0), (3, 4), (1, 2), (2, 1)):
        found = pool(pairs, [batch[one], batch[other]])
        assert [numbers.tobytes() for numbers in found] == [expected[one], expected[other]]
        assert played[-1] == (2, len(batch[one]) + len(batch[other]))


def test_a_text_of_the_longest_that_there_is(tiny_encoder: Callable[[str], Path]) -> None:
    """No budget of a step cuts a text that must be computed whole."""
    directory = tiny_encoder("bert")
    oracle, batch = encoder_oracle("bert", directory), texts((256, 256, 3))
    core = pooling_core(directory, max_num_batched_tokens=None, max_model_len=256)
    for text, numbers in zip(batch, pool(core, batch), strict=True):
        assert_close(torch.tensor(numbers), expected_of(oracle, "BertModel", text))


def test_every_task_of_an_embedder(tiny_encoder: Callable[[str], Path]) -> None:
    directory, batch = tiny_encoder("bert"), texts((5, 17))
    core = pooling_core(directory, pooler_config={"pooling_type": "CLS"})
    of_tokens = pool(core, batch, PoolingParams(task="token_embed", use_activation=False))
    of_texts = pool(core, batch, PoolingParams(use_activation=False))
    assert [one.shape for one in of_tokens] == [(5, 64), (17, 64)]
    assert all((tokens[0] == text).all() for tokens, text in zip(of_tokens, of_texts, strict=True))


@pytest.mark.parametrize("convert", ["classify", "reward"])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("bert", r"classifier\.weight"), ("roberta-mlm", r"classifier\.(dense\.|out_proj\.)?weight")],
)
def test_a_head_that_an_encoder_has_not_is_named_at_start_up(
    name: str, tensor: str, convert: str, tiny_encoder: Callable[[str], Path]
) -> None:
    with pytest.raises(StartupError, match=rf"tensor '{tensor}' is in none of the files"):
        pooling_core(tiny_encoder(name), convert=convert)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert", "roberta"])
@pytest.mark.parametrize("form", ["texts", "tokens"])
def test_head_does_not_change_embeddings(name: str, form: str, tiny_encoder: Callable[[str], Path]) -> None:
    directory, batch = tiny_encoder(f"{name}-{form}"), texts((5, 17))
    oracle = encoder_oracle(f"{name}-{form}", directory)
    for text, numbers in zip(batch, pool(pooling_core(directory, convert="embed"), batch), strict=True):
        with torch.inference_mode():
            given = oracle(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
        assert_close(torch.tensor(numbers), nn.functional.normalize(given[0].mean(0), dim=0))
