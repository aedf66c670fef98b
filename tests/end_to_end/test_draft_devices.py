# SPDX-License-Identifier: Apache-2.0
"""Each drafter on an asynchronous device: host reads follow downloads, and tokens equal those without drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire import SamplingParams
from quire.executor import uniproc
from tests.end_to_end.test_draft_heads import MODEL, NUM_GUESSES, generate, guessing
from tests.end_to_end.test_draft_heads import proposed as proposed
from tests.end_to_end.test_drafts import facts, jobs
from tests.end_to_end.test_overlapped import STEM, Job, overlapped, serve
from tests.end_to_end.test_speculation import guessing_for
from tests.fixtures.draft_heads import HEADS, Target, write_mtp
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import oracle_of
from tests.worker.fake_gpu import FakeGpu

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 1},
    "suffix": {},
    "auto": {"adaptive": True},
    "draft_model": {"quantization": "int8", "num_speculative_tokens": 3},
    "medusa": {},
    "eagle": {"num_speculative_tokens": 3},
    "eagle3": {"num_speculative_tokens": 4},
    "mtp": {"num_speculative_tokens": 2},
}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Return a fake GPU that fails if the worker reads a tensor before its download; kernels are the device."""
    gpu = FakeGpu()

    def guarded(read: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: Tensor, *args: Any) -> Any:
            by_worker = sys._getframe(1).f_globals["__name__"].startswith("quire.worker.")
            assert not by_worker or gpu.has_downloaded(tensor), "the host reads what is on the device"
            return read(tensor, *args)

        return checked

    def make(name: str) -> FakeGpu:
        for name in ("numpy", "tolist", "item"):
            monkeypatch.setattr(Tensor, name, guarded(getattr(Tensor, name)))
        return gpu

    monkeypatch.setattr(uniproc, "make_device", make)
    return gpu


@pytest.mark.parametrize("steps", quick([1, 3], [3]))
@pytest.mark.parametrize("method", quick(METHODS, ["draft_model"]))
def test_every_method_on_a_device_keeps_the_tokens(
    method: str,
    steps: int,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    restore_threads: None,
) -> None:
    model = tiny_model("deepseekv3" if method == "mtp" else MODEL)
    if method == "mtp":
        model = write_mtp("deepseekv3", model, tmp_path / "model")
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, "max_num_batched_tokens": 24}
    args |= {"max_num_seqs": 8, "num_gpu_blocks_override": 16}
    expected, _ = serve(jobs()[:10], **args)
    keys = {"method": method, "adaptive": False} | METHODS[method]
    keys |= guessing_for(model, method, expected, tmp_path)
    request.getfixturevalue("fake_gpu")
    got, stats = serve(jobs()[:10], **args, **overlapped(steps), speculative_config=keys)
    assert facts(got) == facts(expected)
    assert (stats.get("spec_decoding") or {}).get("num_draft_tokens", 0) > 0 or method == "auto"


@pytest.mark.more
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("family", [MODEL, "mamba2"])
def test_self_drafting_on_a_device_is_always_accepted(
    family: str,
    steps: int,
    tiny_model: Callable[[str], Path],
    request: pytest.FixtureRequest,
    restore_threads: None,
) -> None:
    """Also where steps are in flight behind the one that is guessed for, and with states that go back."""
    model = tiny_model(family)
    shapes: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 20})
    texts = [
        Job(
            STEM[: 4 * number],
            SamplingParams(**shapes[number % 2], seed=number, max_tokens=24, ignore_eos=True),
        )
        for number in range(1, 7)
    ]
    request.getfixturevalue("fake_gpu")
    args = {"model": str(model), "max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    _, stats = serve(texts, **args, **overlapped(steps), **guessing(model, "draft_model"))
    spec = stats["spec_decoding"]
    assert spec["num_accepted_tokens"] > 0.9 * spec["num_draft_tokens"] > 40


@pytest.mark.parametrize("family", quick(["mamba", "qwen3next", "falconh1", "recurrentgemma"], ["mamba"]))
def test_states_roll_back_behind_drafts_on_a_device(
    family: str, tiny_model: Callable[[str], Path], request: pytest.FixtureRequest, restore_threads: None
) -> None:
    args: dict[str, Any] = {"model": str(tiny_model(family)), "max_model_len": 64, "max_num_seqs": 4}
    args |= {"max_num_batched_tokens": 24}
    request.getfixturevalue("fake_gpu")
    expected, _ = serve(jobs()[:6], **args)
    keys = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    got, stats = serve(jobs()[:6], **args, speculative_config=keys)
    assert facts(got) == facts(expected)
    assert stats["spec_decoding"]["num_draft_tokens"] > stats["spec_decoding"].get("num_accepted_tokens", 0)


@pytest.mark.more
@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_drafts_on_a_device_are_those_of_the_formulas(
    name: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    proposed: list[tuple[list[int], list[int]]],
    request: pytest.FixtureRequest,
    restore_threads: None,
) -> None:
    """While two more steps are in flight, whose states stand behind those that are read."""
    heads, model = HEADS[name], tiny_model(MODEL)
    directory = heads.write(tmp_path / "heads")
    request.getfixturevalue("fake_gpu")
    generate(model, **guessing(directory, heads.method), **overlapped(3))
    target, tensors = Target(oracle_of(model)), heads.tensors(directory)
    assert sum(len(found) >= 3 for _, found in proposed) > 40
    for ids, found in proposed:
        assert found == heads.guesses(target, tensors, ids, NUM_GUESSES + 2)[: len(found)]
