# SPDX-License-Identifier: Apache-2.0
"""Models that see, in a worker: tokens and logprobs of transformers, and the same bits in any chunks and company."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.library import set_num_threads
from quire.media import both_ways
from quire.sampling_params import SamplingParams
from quire.worker.worker import Worker
from tests.fixtures.seeing_models import IMAGE_TOKEN, SEEING, Picture, Seeing, make_seeing
from tests.multimodal.worker.driver import MediaDriver, Running, Shown, seeing_worker, shown

NUM_TOKENS = 5
SPECIAL = {IMAGE_TOKEN + number: -100.0 for number in range(4)}
GREEDY = SamplingParams(temperature=0, logprobs=3, logit_bias=SPECIAL, max_tokens=NUM_TOKENS)

Prompts = Callable[[str], Shown]


@pytest.fixture(name="seeing", scope="module", params=list(SEEING))
def _seeing(request: Any, tmp_path_factory: Any) -> Iterator[tuple[Seeing, Any, Worker, Path]]:
    path = tmp_path_factory.mktemp(request.param)
    model = make_seeing(request.param, path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        worker = seeing_worker(path, monkeypatch)
        yield SEEING[request.param], model, worker, path
        worker.shutdown()


def prompt_of(family: Seeing, kind: str, path: Path) -> Shown:
    """A prompt with so many images, perhaps the first in the second turn."""
    pictures = [family.picture(seed) for seed in range(3)]
    parts: dict[str, list[int | Picture]] = {
        "one": [5, 11, pictures[0], 13, 17],
        "late": [*range(20, 41), pictures[1], 3, 4, 8],
        "three": [9, pictures[0], 10, pictures[1], 23, 24, pictures[2], 31],
        "text": [*range(8, 31)],
    }
    return shown(parts[kind], path, both_ways=family.both_ways, is_prefix=family.is_prefix)


def joined(pictures: list[Picture]) -> dict[str, Tensor]:
    """Inputs of transformers' model for several images."""
    found: dict[str, Tensor] = {}
    for name in pictures[0].arrays if pictures else ():
        arrays = [picture.arrays[name] for picture in pictures]
        if name == "pixel_values" and "target_sizes" in pictures[0].arrays:
            found[name] = torch.from_numpy(np.concatenate(arrays, -1))
            continue
        if name == "pixel_values" and "image_sizes" in pictures[0].arrays and arrays[0].ndim == 4:
            height, width = (max(array.shape[side] for array in arrays) for side in (2, 3))
            padding = [((0, 0), (0, 0), (0, height - a.shape[2]), (0, width - a.shape[3])) for a in arrays]
            arrays = [np.pad(array, pads) for array, pads in zip(arrays, padding, strict=True)]
        if name == "pixel_values" and "image_sizes" in pictures[0].arrays and arrays[0].ndim == 5:
            most = max(array.shape[1] for array in arrays)
            pads = [((0, 0), (0, most - array.shape[1]), *[(0, 0)] * 3) for array in arrays]
            found[name] = torch.from_numpy(np.concatenate([*map(np.pad, arrays, pads)]))
            continue
        if name in ("image_pixel_values", "image_attention_mask"):
            most = max(array.shape[1] for array in arrays)
            pads = [((0, 0), (0, most - array.shape[1]), *[(0, 0)] * (array.ndim - 2)) for array in arrays]
            fill = float(name == "image_attention_mask")
            arrays = [
                np.pad(array, each, constant_values=fill) for array, each in zip(arrays, pads, strict=True)
            ]
            found[name] = torch.from_numpy(np.concatenate(arrays))
            continue
        of_one_batch = arrays[0].ndim == 5 or name == "pixel_attention_mask"
        found[name] = torch.from_numpy(np.concatenate(arrays, int(of_one_batch)))
    return found


@torch.inference_mode()
def logprobs_of(family: Seeing, model: Any, prompt: Shown, output: list[int]) -> Tensor:
    """transformers' logprobs [len(output), V] before each token of the output."""
    ids = torch.tensor([prompt.token_ids + output])
    more = {name: make(ids) for name, make in family.more.items()}
    if family.is_prefix:  # without an image the language model is used as it is alone
        types = torch.ones_like(ids)
        types[:, : len(prompt.token_ids) if prompt.pictures else 0] = 0
        more["token_type_ids"] = types
    logits = model(input_ids=ids, **joined(prompt.pictures), **more, use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[len(prompt.token_ids) - 1 : -1]


def run(worker: Worker, prompt: Shown, chunk: int = 256) -> Running:
    driver = MediaDriver(worker)
    driver.submit("r", prompt, GREEDY)
    found = driver.generate("r", NUM_TOKENS, chunk)
    driver.finish("r")
    return found


@pytest.mark.parametrize("kind", ["one", "late", "three", "text"])
def test_tokens_and_logprobs_equal_those_of_transformers(
    seeing: tuple[Seeing, Any, Worker, Path], kind: str
) -> None:
    family, model, worker, path = seeing
    prompt = prompt_of(family, kind, path)
    found = run(worker, prompt)
    want = logprobs_of(family, model, prompt, found.output)
    bias = torch.zeros(want.shape[1])
    bias[list(SPECIAL)] = torch.tensor(list(SPECIAL.values()))
    assert found.output == (want + bias).argmax(-1).tolist()
    for entry, row, token_id in zip(found.logprobs, want, found.output, strict=True):
        assert abs(entry.logprobs[0] - float(row[token_id])) < 2e-3


def bits_of(found: Running) -> tuple[list[int], list[list[float]]]:
    return found.output, [entry.logprobs for entry in found.logprobs]


def least_chunk(prompt: Shown) -> int:
    """The smallest chunk that holds each stretch that is seen both ways."""
    return max([last - first for first, last in both_ways(prompt.media)], default=1)


@pytest.mark.parametrize("kind", ["one", "three"])
def test_bits_depend_on_no_chunks_company_or_preemption(
    seeing: tuple[Seeing, Any, Worker, Path], kind: str
) -> None:
    family, _, worker, path = seeing
    prompt, other = prompt_of(family, kind, path), prompt_of(family, "late", path)
    want = bits_of(run(worker, prompt))
    assert want != bits_of(run(worker, other))
    for chunk in (16, 5):
        assert bits_of(run(worker, prompt, max(chunk, least_chunk(prompt)))) == want
    driver = MediaDriver(worker)
    text = driver.submit("text", prompt_of(family, "text", path), GREEDY)
    found, beside = driver.submit("r", prompt, GREEDY), driver.submit("beside", other, GREEDY)
    chunks = {"r": max(7, least_chunk(prompt)), "beside": max(11, least_chunk(other)), "text": 6}
    for step in range(100):
        waiting = [name for name, request in driver.running.items() if len(request.output) < NUM_TOKENS]
        if not waiting:
            break
        driver.step({name: chunks[name] for name in waiting})
        if step == 3:
            driver.preempt("r")
    for name in list(driver.running):
        driver.finish(name)
    assert bits_of(found) == want
    assert bits_of(beside) == bits_of(run(worker, other))
    assert bits_of(text) == bits_of(run(worker, prompt_of(family, "text", path)))


def test_embeddings_depend_on_no_order_slices_or_threads(
    seeing: tuple[Seeing, Any, Worker, Path],
) -> None:
    family, _, worker, path = seeing
    media = prompt_of(family, "three", path).media
    digests = [item.digest for item in media]
    assert worker._encoder is not None

    def encoded(order: list[int], budget_s: float) -> list[Tensor]:
        worker.drop_media(digests)
        for _ in range(10_000):
            progress = worker.encode_media([media[index] for index in order], budget_s)
            assert not progress.failed
            if len(progress.done) == len(media):
                break
        found = [worker._encoder.embeddings(digest) for digest in digests]
        return [each for one in found for each in (one.values, *one.deepstack)]

    want, threads = encoded([0, 1, 2], 1e9), torch.get_num_threads()
    try:
        set_num_threads(1)
        alone = encoded([2, 0, 1], 0.0)
    finally:
        set_num_threads(threads)
    assert all(map(torch.equal, want, alone))
