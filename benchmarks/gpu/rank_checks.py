# SPDX-License-Identifier: Apache-2.0
"""Two ranks with a device each: graphs beside eager steps, tokens beside one rank's, a lost one; stages, replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import Generated, engine, greedy
from benchmarks.gpu.runner import Check
from benchmarks.gpu.target import Target
from quire.entrypoints.llm import LLM
from quire.errors import EngineError
from tests.fixtures.tiny_models import VOCAB_SIZE, write_tiny_model

RANKS = 2
_NAME = "llama"
_LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 256,
    "load_format": "auto",
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "graphs captured at start": {},
    "graphs captured lazily": {"cuda_graph_capture": "lazy"},
    "overlapped": {"async_scheduling": True},
}
_SOON_S = 12.0
"""How long the loss of a rank may take to be said."""


def why_left_out(target: Target) -> str | None:
    """Return the reason to leave these checks out, or None."""
    found = torch.cuda.device_count() if target.device.type == "cuda" else RANKS
    if target.device.type == "xpu":
        return f"{RANKS} ranks: left out, they are for --device cuda"
    return (
        None if found >= RANKS else f"{RANKS} ranks: left out, they want {RANKS} devices and there is {found}"
    )


def checks(target: Target, scratch: Path) -> Iterator[Check]:
    """None where there are too few devices. `scratch` is a folder for a checkpoint."""
    if why_left_out(target) is not None:
        return
    directory = scratch / "ranks"
    write_tiny_model(_NAME, directory)
    ranks = _Ranks(target, directory)
    for name, args in _VARIANTS.items():
        run = partial(ranks.beside_eager, **args)
        yield Check(f"2 ranks: {name}, same tokens and logprobs as eager", run)
    yield Check("2 ranks: float32, same tokens as one", ranks.beside_one)
    for name, args in _VARIANTS.items():
        yield Check(f"2 stages: {name}, same tokens and logprobs as one", partial(ranks.stages, **args))
    yield Check("2 replicas: same tokens and logprobs as one", ranks.replicas)
    yield Check("2 ranks: seconds until one that is killed is named", ranks.killed, _SOON_S)


class _Ranks:
    """Engines of two ranks, with a checkpoint of their own."""

    def __init__(self, target: Target, directory: Path) -> None:
        self._target, self._directory = target, directory
        self._invariance: dict[str, Any] = {"batch_invariant": True} if target.is_gpu else {}
        self._eager: list[Generated] | None = None
        self._alone: list[Generated] | None = None
        torch.manual_seed(0)
        self._prompts = [torch.randint(3, VOCAB_SIZE, (length,)).tolist() for length in (1, 7, 40, 65)]

    def beside_eager(self, **args: Any) -> float:
        """With the tiles that every batch has, as bits are compared."""
        if self._eager is None:
            self._eager = self._invariant(tensor_parallel_size=RANKS, enforce_eager=True)
        return _num_different(self._invariant(tensor_parallel_size=RANKS, **args), self._eager)

    def beside_one(self) -> float:
        """Sums are of other parts, so bits are others; in float32 the likeliest tokens are the same."""
        tokens = [
            [one.token_ids for one in self._generated(tensor_parallel_size=ranks, dtype="float32")]
            for ranks in (1, RANKS)
        ]
        return _num_different(*tokens)

    def stages(self, **args: Any) -> float:
        """Nothing is computed otherwise than by one process, so bits are the same."""
        if self._alone is None:
            self._alone = self._invariant()
        return _num_different(self._invariant(pipeline_parallel_size=RANKS, **args), self._alone)

    def replicas(self) -> float:
        """Each in a process of its own, with one engine before them."""
        return _num_different(*(self._said_by(num) for num in (1, RANKS)))

    def _said_by(self, num_replicas: int) -> list[tuple[list[int], object]]:
        llm = LLM(
            str(self._directory),
            device=self._target.device.type,
            skip_tokenizer_init=True,
            data_parallel_size=num_replicas,
            **_LIMITS | self._invariance,
        )
        try:
            params = greedy(24, logprobs=0, detokenize=False)
            outputs = llm.generate(self._prompts, params, use_tqdm=False)
            return [(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs]
        finally:
            llm.shutdown()

    def killed(self) -> float:
        """Seconds after which an engine says so whose second rank ends in the midst of a step."""
        with self._engine(tensor_parallel_size=RANKS) as running:
            running.add(self._prompts[0], greedy(200))
            for _ in range(5):
                running.step()
            os.kill(running.pid_of_rank(1), signal.SIGKILL)
            started = time.monotonic()
            try:
                running.finish()
            except EngineError as error:
                if "rank 1" not in str(error):
                    raise
                return time.monotonic() - started
        raise RuntimeError("nothing was said of it")

    def _invariant(self, **args: Any) -> list[Generated]:
        return self._generated(**self._invariance | args)

    def _generated(self, **args: Any) -> list[Generated]:
        with self._engine(**args) as running:
            return running.generate(self._prompts, greedy(24, logprobs=0))

    def _engine(self, **args: Any) -> Any:
        return engine(self._target, self._directory, **_LIMITS | {"async_scheduling": False} | args)


def _num_different(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """Return the number of items that differ."""
    return float(sum(one != other for one, other in zip(ours, theirs, strict=True)))
