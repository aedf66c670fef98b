"""Decode steps from tapes: the tokens of the plain forward pass, whatever steps come between."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata, StepMetadata
from quire.kernels.cpu import library
from quire.models.registry import Registry
from quire.worker import taped_forward
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.taped_forward import TapedForward

FAMILIES = (
    "llama-tied-bias",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3-window-partial",
    "gemma2",
    "gemma3",
    "opt-post-norm",
    "gpt2",
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[taped_forward.Tape]:
    """The tapes that the test records."""
    tapes: list[taped_forward.Tape] = []

    def record(*args: Any) -> taped_forward.Tape:
        tapes.append(original(*args))
        return tapes[-1]

    original = taped_forward.record
    monkeypatch.setattr(taped_forward, "record", record)
    return tapes


def test_families_are_those_of_the_registry(tiny_model: Callable[[str], Path]) -> None:
    configs = [json.loads((tiny_model(family) / "config.json").read_text()) for family in FAMILIES]
    assert (
        sorted(name for config in configs for name in config["architectures"])
        == Registry().get_supported_archs()
    )


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_with_tapes(
    family: str, dtype: str, tiny_model: Callable[[str], Path], recorded: list[taped_forward.Tape]
) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n, logprobs=2) for n in (5, 9, 14, 3, 20)]
    prompts = [[token + 3 for token in range(length)] for length in (2, 30, 7, 17, 5)]
    outputs = []
    for eager in (True, False):
        llm = LLM(str(tiny_model(family)), dtype=dtype, max_model_len=64, max_num_seqs=4, enforce_eager=eager)
        outputs.append([one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)])
        assert bool(recorded) is not eager
    for plain, taped in zip(*outputs, strict=True):
        assert (plain.token_ids, plain.logprobs) == (taped.token_ids, taped.logprobs)


def step(ids: list[int], starts: list[int]) -> StepInputs:
    """A step that only decodes, if there are as many ids as starts."""
    table = torch.arange(len(starts) * 4, dtype=torch.int32).view(-1, 4)[:, :3]
    positions = torch.tensor(starts)
    metadata = AttentionMetadata(
        torch.arange(len(starts) + 1, dtype=torch.int32),
        (positions + 1).int(),
        table,
        positions,
        1,
        int(positions.max()) + 1,
    )
    rows = np.arange(len(starts))
    layout = StepLayout(rows, rows, rows + 1, np.arange(len(rows) + 1), np.ones_like(rows), rows, rows)
    return StepInputs(layout, torch.tensor(ids), positions, torch.from_numpy(rows), (metadata,))


class Lookup:
    """A model of one kernel, which counts its passes."""

    def __init__(self) -> None:
        self.table = torch.arange(8.0)[:, None]
        self.passes = 0

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: StepMetadata) -> Tensor:
        self.passes += 1
        return ops.embedding(input_ids, self.table)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_python_runs_once_for_each_number_of_requests() -> None:
    model = Lookup()
    forward = TapedForward(model, 4, (4,))
    for ids in ([1, 2], [3, 4], [5], [6, 7], [2]):
        assert forward(step(ids, list(range(len(ids))))).flatten().tolist() == ids
    assert model.passes == 2
    assert forward(step([1, 2, 3], [0, 5])).flatten().tolist() == [1, 2, 3]
    assert forward(step([3, 2, 1], [0, 5])).flatten().tolist() == [3, 2, 1]
    assert model.passes == 4, "a step that prefills is not recorded"


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_a_recorded_step_with_a_bad_id_says_so() -> None:
    forward = TapedForward(Lookup(), 2, (4,))
    forward(step([1], [0]))
    with pytest.raises(IndexError, match="embedding"):
        forward(step([8], [0]))
    assert forward(step([7], [0])).item() == 7


class Root(Lookup):
    """A model that leaves something to torch."""

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: StepMetadata) -> Tensor:
        return super().forward(input_ids, positions, metadata).sqrt()


@pytest.mark.skipif(library.loaded() is None, reason=library.status())
def test_a_model_that_computes_otherwise_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Root()
    forward = TapedForward(model, 2, (4,))
    with caplog.at_level(logging.INFO):
        assert forward(step([1, 4], [0, 0])).flatten().tolist() == [1, 2]
    assert "not recorded: aten.sqrt" in caplog.text
    assert forward(step([4, 1], [0, 0])).flatten().tolist() == [2, 1]
    assert model.passes == 3
