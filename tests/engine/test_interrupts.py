"""Ctrl-C ends a call of `generate`, and nothing else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.interrupts import held_interrupts
from quire.errors import ConflictError
from quire.inputs import PromptType

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


def test_a_second_interrupt_does_not_wait() -> None:
    reached: list[str] = []

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("held")
        signal.raise_signal(signal.SIGINT)
        reached.append("not held")

    with pytest.raises(KeyboardInterrupt), held_interrupts():
        step()
    assert reached == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_handler_of_a_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_change_nothing() -> None:
    def run() -> None:
        with held_interrupts():
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
