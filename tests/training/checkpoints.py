# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints of one model, the updates from one to the other, and an engine's outputs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, LLMEngine, SamplingParams
from quire.training.trainer import WeightServer, describe, remove_segment, write_segment

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 6, [3, 1, 4, 1, 5, 9, 2, 6] * 3 + [7, 7, 7], [11, 12, 13]]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=8, temperature=1.0, seed=5, logprobs=1, prompt_logprobs=1, ignore_eos=True
)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "cpu_threads": 1, "enable_packed_weights_cache": False}

Results = list[tuple[list[int], list[dict[int, float]]]]


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of one file."""
    return load_file(directory / "model.safetensors")


def changed(directory: Path, place: Path, seed: int = 1) -> Path:
    """Write a checkpoint with other weights of the same names, shapes and dtypes; returns its place."""
    shutil.copytree(directory, place)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=draw))).to(tensor.dtype)
        for name, tensor in tensors_of(directory).items()
    }
    save_file(tensors, place / "model.safetensors")
    return place


def results(llm: LLM, **terms: Any) -> Results:
    """Return tokens and logprobs of all prompts, greedy and sampled."""
    found = []
    for params in (GREEDY, SAMPLED):
        for output in llm.generate(
            [{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False, **terms
        ):
            entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
            numbers = [{token: one.logprob for token, one in entry.items()} for entry in entries if entry]
            found.append((list(output.outputs[0].token_ids), numbers))
    return found


def fresh(directory: Path, **args: Any) -> tuple[Results, dict[str, str]]:
    """Return what an engine that starts with a checkpoint says, and its checksums."""
    llm = LLM(str(directory), **{**OPTIONS, **args})
    try:
        return results(llm), llm.weights.checksums()
    finally:
        llm.shutdown()


def by_directory(llm: LLM, place: Path) -> None:
    llm.weights.begin()
    llm.weights.update({"path": str(place)})
    llm.weights.finish()


def by_segments(llm: LLM, place: Path) -> None:
    """Send the tensors in two segments of shared memory, each removed once it is read."""
    tensors = list(tensors_of(place).items())
    llm.weights.begin()
    for number, part in enumerate((tensors[:3], tensors[3:])):
        name = f"quire-test-{os.getpid()}-{number}"
        try:
            llm.weights.update(write_segment(name, dict(part)))
        finally:
            remove_segment(name)
    llm.weights.finish()


def by_tcp(llm: LLM, place: Path) -> None:
    tensors = tensors_of(place)
    with trainer(lambda server: server.send(tensors)) as server:
        llm.weights.connect(server.address)
        llm.weights.begin()
        llm.weights.update(describe(tensors))
        llm.weights.finish()
        llm.weights.disconnect()


@contextmanager
def trainer(work: Callable[[WeightServer], None]) -> Iterator[WeightServer]:
    """Run a trainer's side on a thread: accept the engine, then do the work."""
    server = WeightServer()

    def run() -> None:
        server.accept()
        work(server)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        thread.join()
        server.close()


WAYS: dict[str, Callable[[LLM, Path], None]] = {
    "directory": by_directory,
    "segments": by_segments,
    "tcp": by_tcp,
}


def finished(engine: LLMEngine) -> dict[str, list[int]]:
    """Run an engine's requests to their end; returns the tokens of each."""
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return found
