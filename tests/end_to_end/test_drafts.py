# SPDX-License-Identifier: Apache-2.0
"""Verified drafts on real models: right, wrong or half right, they change no bit of the results."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire.executor import uniproc
from quire.outputs import RequestOutput
from quire.spec_decode.drafter import Draft, Text
from quire.spec_decode.speculation import Speculation
from quire.spec_decode.worker import drafting
from tests.end_to_end.test_overlapped import Job, jobs_of_all_kinds, overlapped, serve
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE
from tests.worker.fake_gpu import FakeGpu


class FakeDrafter:
    """Knows how it ended the last time, and says so up to a random place, wrong from there on."""

    keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self._draw = random.Random(3)
        self._ends = [
            output.prompt_token_ids + completion.token_ids
            for output in outputs
            for completion in output.outputs
        ]
        self._lengths: dict[str, int] = {}
        self.num_accepted = self.num_wrong = 0

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        for name, tokens, *_ in texts:
            self.num_accepted += len(tokens) - 1 - self._lengths.get(name, len(tokens) - 1)
            self._lengths[name] = len(tokens)
        return [Draft(self._guess(text.token_ids.tolist())) for text in texts]

    def forget(self, request_id: str) -> None:
        """It goes by the tokens alone."""

    def _guess(self, known: list[int]) -> list[int]:
        ends = [end[len(known) :] for end in self._ends if end[: len(known)] == known]
        if not ends:  # another step of a sequence that is over by now, or of the start
            return []
        right = ends[0][: self._draw.choice([0, 0, 1, 3, 6])]
        wrong = [self._draw.randrange(VOCAB_SIZE) for _ in range(self._draw.choice([0, 0, 1, 4]))]
        self.num_wrong += len(wrong)
        return right + wrong


def jobs() -> list[Job]:
    """Nobody aborts: when a caller has had enough depends on how many tokens come at once."""
    return [job._replace(abort_after=None) for job in jobs_of_all_kinds()]


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """The core may have told of tokens behind a stop string, so the count of tokens is apart."""
    return [(output.outputs, output.prompt_logprobs, output.finished) for output in outputs]


@pytest.fixture
def serve_with_drafts(monkeypatch: pytest.MonkeyPatch, restore_threads: None) -> Callable[..., Any]:
    def serve_again(jobs: list[Job], expected: list[RequestOutput], **args: Any) -> Any:
        drafter = FakeDrafter(expected)
        speculation = Speculation({"fake": drafter}, adaptive=False)
        with monkeypatch.context() as patched:
            patched.setattr(drafting, "make_speculation", lambda *parts: speculation)
            found = serve(jobs, **args)
        assert min(drafter.num_accepted, drafter.num_wrong) > 2 * len(jobs)
        return found

    return serve_again


@pytest.mark.parametrize(
    "loop", [pytest.param({}, marks=pytest.mark.more), overlapped(2)], ids=["plain", "overlapped"]
)
def test_all_parameters_with_preemption(
    loop: dict[str, Any], tiny_model: Callable[[str], Path], serve_with_drafts: Callable[..., Any]
) -> None:
    args: dict[str, Any] = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96}
    args |= {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    expected, _ = serve(jobs(), **args)
    got, stats = serve_with_drafts(jobs(), expected, **args, **loop)
    assert facts(got) == facts(expected)
    assert stats["num_preemptions"] > 0


@pytest.mark.parametrize(
    "family",
    quick(
        ["gemma3", "gpt2", "mamba", "falconh1", "qwen3next", "recurrentgemma"],
        ["gemma3", "qwen3next"],
    ),
)
def test_families(
    family: str, tiny_model: Callable[[str], Path], serve_with_drafts: Callable[..., Any]
) -> None:
    """Groups of layers with windows, learned positions, states; steps without drafts are replayed from
    recorded graphs."""
    args = {"model": str(tiny_model(family)), "max_model_len": 64, "max_num_seqs": 4}
    expected, _ = serve(jobs()[:8], **args)
    got, _ = serve_with_drafts(jobs()[:8], expected, **args)
    assert facts(got) == facts(expected)


@pytest.mark.parametrize("steps", quick([1, 3], [3]))
def test_an_asynchronous_device(
    steps: int,
    tiny_model: Callable[[str], Path],
    serve_with_drafts: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows are on the device, and get drafts with the step's one upload."""
    args: dict[str, Any] = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96}
    args |= {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    expected, _ = serve(jobs()[:12], **args)
    monkeypatch.setattr(uniproc, "make_device", lambda name: FakeGpu())
    got, _ = serve_with_drafts(jobs()[:12], expected, **args, **overlapped(steps))
    assert facts(got) == facts(expected)
