# SPDX-License-Identifier: Apache-2.0
"""Models that are pooled, computed by several ranks: the numbers of one process, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.kernels.cpu import library
from quire.pooling_params import PoolingParams
from tests.end_to_end.test_pooled_models import prompts
from tests.end_to_end.test_words_weights import write_splade
from tests.fixtures.pooled import pool, pooling_core, write_model, write_sentence_transformer
from tests.fixtures.thread_ranks import ThreadRanks

CASES: dict[str, dict[str, Any]] = {
    "stages": {"pipeline_parallel_size": 2},
    "shares": {"tensor_parallel_size": 2},
    "both": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
TASKS = [PoolingParams(task="embed"), PoolingParams(task="token_embed")]

pytestmark = pytest.mark.skipif(library.loaded() is None, reason=library.status())


@pytest.fixture(autouse=True)
def _thread_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())


def pooled(directory: Path, wanted: list[PoolingParams], **args: Any) -> list[NDArray[np.float32]]:
    """Twice, so that prefixes are found where the model has any."""
    core = pooling_core(directory, cpu_threads=1, tp_invariant=True, **args)
    texts = prompts((3, 30, 17, 40))
    found = [numbers for _ in range(2) for params in wanted for numbers in pool(core, texts, params)]
    core.shutdown()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_decoder_gives_the_same_numbers(case: str, tmp_path: Path) -> None:
    """Embeddings of texts and of each token are equal, for prompts computed in chunks."""
    write_model("qwen3", tmp_path, "Qwen3ForCausalLM")
    write_sentence_transformer(tmp_path, pooling="mean_tokens", normalizes=True)
    limits = {"max_num_batched_tokens": 12, "max_num_seqs": 4}
    alone = pooled(tmp_path, TASKS, **limits)
    ranks = pooled(tmp_path, TASKS, **limits, **CASES[case])
    assert [one.tobytes() for one in ranks] == [one.tobytes() for one in alone]


@pytest.mark.parametrize("name", ["bert-texts", "modernbert-tokens"])
@pytest.mark.parametrize("case", ["stages", "shares"])
def test_an_encoder_gives_the_same_numbers(case: str, name: str, tiny_encoder: Callable[[str], Path]) -> None:
    alone = pooled(tiny_encoder(name), [PoolingParams()])
    ranks = pooled(tiny_encoder(name), [PoolingParams()], **CASES[case])
    assert [one.tobytes() for one in ranks] == [one.tobytes() for one in alone]


@pytest.mark.parametrize("case", ["stages", "shares"])
def test_weights_of_all_words_are_the_same(
    case: str, tmp_path: Path, tiny_encoder: Callable[[str], Path]
) -> None:
    """By a head whose matrix is the table of tokens, of which ranks have parts, and the first stage all."""
    directory = tmp_path / "splade"
    shutil.copytree(tiny_encoder("bert-mlm"), directory)
    write_splade(directory, pooling_strategy="max", activation_function="relu")
    alone = pooled(directory, [PoolingParams()])
    ranks = pooled(directory, [PoolingParams()], **CASES[case])
    assert [one.tobytes() for one in ranks] == [one.tobytes() for one in alone]
