# SPDX-License-Identifier: Apache-2.0
"""Blocks of images are stored by the image: found again after a restart, and by no other image in the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.kv_store import tier
from quire.multimodal.worker import encoders
from tests.fixtures.seeing_models import SEEING, make_seeing
from tests.multimodal.worker.driver import Shown, shown
from tests.multimodal.worker.test_families import GREEDY

OPTIONS: dict[str, Any] = {
    "max_model_len": 128, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4, "skip_tokenizer_init": True,
}  # fmt: skip
START = [5, 11, 12, 13, 14]
"""Text before the image: one block of its own."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as a busy machine takes, and take pictures as they are."""
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "SETTLE_S"):
        monkeypatch.setattr(tier, name, 300.0)
    monkeypatch.setattr(tier, "EXPECTED_BYTES_PER_S", 1e15)
    monkeypatch.setattr(encoders.EncoderStore, "_floats", lambda _self, arrays: arrays)


def run(model: Path, store: Path | None, prompts: list[Shown]) -> tuple[list[Any], list[int]]:
    """Return tokens with logprobs of one engine's requests, one after the other, and the tokens from the store."""
    llm = LLM(str(model), kv_store=None if store is None else str(store), **OPTIONS)
    answers, num_stored = [], []
    try:
        for prompt in prompts:
            (output,) = llm.generate([{"prompt_token_ids": prompt.token_ids, "media": prompt.media}], GREEDY)
            (one,) = output.outputs
            places = zip(one.token_ids, one.logprobs or [], strict=True)
            answers.append((list(one.token_ids), [place[token].logprob for token, place in places]))
            num_stored.append(output.num_stored_tokens)
    finally:
        llm.llm_engine.shutdown()
    return answers, num_stored


@pytest.mark.more
@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_blocks_of_an_image_are_found_by_that_image_only(name: str, tmp_path: Path) -> None:
    family, model, store = SEEING[name], tmp_path / "model", tmp_path / "rows"
    model.mkdir()
    make_seeing(name, model)
    one, two = (
        shown(
            [*START, family.picture(seed), *range(20, 41)],
            model,
            both_ways=family.both_ways,
            is_prefix=family.is_prefix,
        )
        for seed in range(2)
    )
    assert one.token_ids == two.token_ids
    expected, _ = run(model, None, [one, two])
    assert expected[0] != expected[1], "they answer alike"
    assert run(model, store, [one]) == (expected[:1], [0])
    answers, num_stored = run(model, store, [two, one])
    assert answers == expected[::-1]
    assert num_stored[0] <= len(START)
    assert num_stored[1] > len(START) + 4
    assert run(model, store, [one, two])[0] == expected
