# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a call of `generate`, and nothing else."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.client import HeldInterrupts
from quire.errors import ConflictError, EngineDeadError
from quire.inputs import PromptType
from quire.sampling_params import RequestOutputKind

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS: list[PromptType] = [[5 + number] * 40 for number in range(4)]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_engine_goes_on_after_an_interrupt_in_any_step(
    step: int, async_scheduling: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a step is executed, when its plan is made: prompts in chunks, little memory, swapping."""
    options: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 9,
        "swap_space": 0.01,
        "max_model_len": 64,
        "async_scheduling": async_scheduling,
    }
    model = str(tiny_model("llama"))
    llm, expected = LLM(model, **options), tokens(LLM(model, max_model_len=64))
    executor = llm.llm_engine._clients[0]._core.executor  # type: ignore[attr-defined]
    name = "submit" if async_scheduling else "execute_model"
    original, num_calls = getattr(executor, name), 0

    def interrupted(plan: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == step:
            signal.raise_signal(signal.SIGINT)
        return original(plan)

    monkeypatch.setattr(executor, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    assert tokens(llm) == expected


def drained(llm: LLM) -> dict[str, list[int]]:
    """Run the engine until it is idle and return the remaining tokens of each request."""
    engine, got = llm.llm_engine, defaultdict[str, list[int]](list)
    while engine.has_unfinished_requests():
        with suppress(KeyboardInterrupt):
            for output in engine.step():
                got[output.request_id] += output.outputs[0].token_ids
    return got


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("method", ["step", "handle"])
def test_a_program_that_goes_on_after_interrupts_misses_no_token(
    method: str, async_scheduling: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step, the last one included, or while a message is handled."""
    llm = LLM(str(tiny_model("llama")), max_model_len=64, async_scheduling=async_scheduling)
    expected = tokens(llm)
    core = llm.llm_engine._clients[0]._core  # type: ignore[attr-defined]
    original, handled = getattr(core, method), 0

    def interrupted(*messages: Any) -> Any:
        nonlocal handled
        handled += len(messages)
        if handled <= 1:  # messages are handled in one go, in which a second interrupt would not be held
            signal.raise_signal(signal.SIGINT)
        return original(*messages)

    monkeypatch.setattr(core, method, interrupted)
    for number, prompt in enumerate(PROMPTS):
        params = PARAMS.clone(output_kind=RequestOutputKind.DELTA)
        llm.llm_engine.add_request(str(number), prompt, params)
    got = drained(llm)
    assert [got[str(number)] for number in range(len(PROMPTS))] == expected


def test_a_second_interrupt_does_not_wait() -> None:
    reached: list[str] = []

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("held")
        signal.raise_signal(signal.SIGINT)
        reached.append("not held")

    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        step()
    assert reached == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_a_second_interrupt_broke_off_is_the_last(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_model("llama")), max_model_len=64)
    executor = llm.llm_engine._clients[0]._core.executor  # type: ignore[attr-defined]

    def interrupted(plan: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    with pytest.raises(EngineDeadError, match=r"failed before \(KeyboardInterrupt\)"):
        tokens(llm)


def test_the_handler_of_a_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with HeldInterrupts():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_change_nothing() -> None:
    def run() -> None:
        with HeldInterrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[Any] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_generate_in_two_threads_is_refused(tiny_model: Callable[[str], Path]) -> None:
    """One would collect the other's outputs."""
    llm = LLM(str(tiny_model("llama")), max_model_len=64)
    expected, refused = tokens(llm), list[Exception]()
    step = llm.llm_engine.step

    def step_and_try() -> Any:
        def attempt() -> None:
            try:
                tokens(llm)
            except ConflictError as error:
                refused.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return step()

    llm.llm_engine.step = step_and_try  # type: ignore[method-assign]
    assert tokens(llm) == expected
    assert refused
