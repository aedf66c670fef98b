# SPDX-License-Identifier: Apache-2.0
"""Models that hear, in a worker: tokens and logprobs of transformers, and the same bits in any chunks and company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.media import MediaItem
from quire.multimodal.processors.base import make_processor
from quire.worker.worker import Worker
from tests.fixtures.hearing_models import BEGIN, END, HEARING, Hearing, Samples, make_hearing, sound
from tests.multimodal.worker.driver import MediaDriver, Shown, seeing_worker, write_item
from tests.multimodal.worker.test_families import GREEDY, NUM_TOKENS, SPECIAL, bits_of, run

Case = tuple[Hearing, Any, Worker, Path]

ONE, TWO, ODD = sound(9_000), sound(16_000, 1), sound(4_777, 2)
PROMPTS: dict[str, list[int | Samples]] = {
    "one": [5, 11, ONE, 13, 17],
    "two": [9, TWO, 10, ONE, 23],
    "second turn": [*range(20, 41), ODD, 3, 4, 8],
    "twice": [6, ODD, 7, ODD, 8],
    "text": [*range(8, 31)],
}


@pytest.fixture(name="case", scope="module", params=list(HEARING))
def _case(request: Any, tmp_path_factory: Any) -> Iterator[Case]:
    path = tmp_path_factory.mktemp(request.param)
    model = make_hearing(request.param, path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        worker = seeing_worker(path, monkeypatch)
        yield HEARING[request.param], model, worker, path
        worker.shutdown()


def prompt_of(case: Case, kind: str) -> Shown:
    family, _, _, path = case
    processor = make_processor(family.architecture, path, {})
    assert processor is not None
    assert processor.sounds is not None
    found = Shown([], [], [])
    for part in PROMPTS[kind]:
        if isinstance(part, int):
            found.token_ids.append(part)
            continue
        start = len(found.token_ids)
        found.token_ids += family.tokens(len(part))
        digest, file = write_item(processor.sounds.prepare(part).arrays, path)
        first, end = start + (found.token_ids[start] == BEGIN), len(found.token_ids)
        last = end - (found.token_ids[-1] == END)
        found.media.append(MediaItem(digest, "audio", start, end, [(first, last)], file))
    return found


@torch.inference_mode()
def logprobs_of(case: Case, kind: str, prompt: Shown, output: list[int]) -> Tensor:
    """Return transformers' logprobs [len(output), V] before each token of the output."""
    family, model, *_ = case
    ids = torch.tensor([prompt.token_ids + output])
    sounds = [part for part in PROMPTS[kind] if not isinstance(part, int)]
    inputs = family.inputs(sounds) if sounds else {}
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, use_cache=False).logits[0]
    return logits.float().log_softmax(-1)[len(prompt.token_ids) - 1 : -1]


@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_and_logprobs_equal_those_of_transformers(case: Case, kind: str) -> None:
    prompt = prompt_of(case, kind)
    found = run(case[2], prompt)
    want = logprobs_of(case, kind, prompt, found.output)
    bias = torch.zeros(want.shape[1])
    bias[list(SPECIAL)] = torch.tensor(list(SPECIAL.values()))
    assert found.output == (want + bias).argmax(-1).tolist()
    for entry, row, token_id in zip(found.logprobs, want, found.output, strict=True):
        assert abs(entry.logprobs[0] - float(row[token_id])) < 2e-3


def test_bits_depend_on_no_chunks_company_or_preemption(case: Case) -> None:
    worker = case[2]
    prompts = {kind: prompt_of(case, kind) for kind in PROMPTS}
    want = {kind: bits_of(run(worker, prompt)) for kind, prompt in prompts.items()}
    assert len({str(bits) for bits in want.values()}) == len(want), "sounds change the answer"
    for chunk in (16, 5):
        assert bits_of(run(worker, prompts["two"], chunk)) == want["two"]
    driver = MediaDriver(worker)
    kinds = ("two", "second turn", "text", "one")
    found = {kind: driver.submit(kind, prompts[kind], GREEDY) for kind in kinds}
    for step in range(100):
        waiting = [name for name, request in driver.running.items() if len(request.output) < NUM_TOKENS]
        if not waiting:
            break
        driver.step({name: 5 + 2 * kinds.index(name) for name in waiting})
        if step == 4:
            driver.preempt("two")
    for name in list(driver.running):
        driver.finish(name)
    assert {kind: bits_of(request) for kind, request in found.items()} == {kind: want[kind] for kind in kinds}


def test_embeddings_depend_on_no_order_or_slices(case: Case) -> None:
    worker = case[2]
    media = [*prompt_of(case, "two").media, *prompt_of(case, "second turn").media]
    digests = [item.digest for item in media]
    assert worker._encoder is not None

    def encoded(order: list[int], budget_s: float) -> list[Tensor]:
        worker.drop_media(digests)
        for _ in range(10_000):
            progress = worker.encode_media([media[index] for index in order], budget_s)
            assert not progress.failed
            if len(progress.done) == len(media):
                break
        return [worker._encoder.embeddings(digest).values for digest in digests]

    assert all(map(torch.equal, encoded([0, 1, 2], 1e9), encoded([2, 0, 1], 0.0)))
