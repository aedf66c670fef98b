# SPDX-License-Identifier: Apache-2.0
"""Tests of constraints in the engine: refusals, and slow grammars that delay no other request."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AddRequest, EngineCoreRequest
from quire.engine.startup import prepare
from quire.engine.tokenizer_cache import end_ids, vocabulary_of
from quire.errors import ConfigError, QuireError, UnavailableError, ValidationError
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.scheduler.output import RequestUpdate
from quire.structured_output.checker import CheckLimitError
from quire.structured_output.request_constraints import Constraints
from quire.structured_output.turns import MAX_WAITING_OF_TENANT, Turn
from tests.engine.tokenizer_kinds import EOS, KINDS, Kind, write_model_dir

WAIT_S = 60.0
NULL: dict[str, Any] = {"distributed_executor_backend": "null"}


def params(regex: str | None) -> SamplingParams:
    wanted = None if regex is None else StructuredOutputsParams(regex=regex)
    return SamplingParams(structured_outputs=wanted, temperature=0.0, max_tokens=3, ignore_eos=True)


class SlowExecutor:
    """Stands in for an executor's `prepare_grammar`: grammars are ready when a test says so."""

    def __init__(self, core: EngineCore) -> None:
        self.futures: list[Future[None]] = []
        core.executor.prepare_grammar = self.prepare  # type: ignore[method-assign]

    def prepare(self, wanted: StructuredOutputsParams) -> Future[None]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def core(null_model_dir: Path) -> Iterator[EngineCore]:
    made = EngineCore(prepare(EngineConfig.from_args(model=str(null_model_dir), **NULL), "offline"))
    yield made
    made.shutdown()


def add(core: EngineCore, name: str, regex: str | None) -> None:
    core.handle(AddRequest(EngineCoreRequest(name, [1, 2, 3], params(regex), 0.0)))


def run(core: EngineCore) -> list[RequestUpdate]:
    updates: list[RequestUpdate] = []
    while core.has_work():
        updates += core.step().updates
        core.scheduler.check_integrity()
    return updates


def test_request_does_not_wait_for_a_grammar_of_another(core: EngineCore) -> None:
    slow = SlowExecutor(core)
    add(core, "held", "a+")
    add(core, "free", None)
    assert {update.request_id for update in run(core)} == {"free"}
    assert core.patience_s is not None
    explained = core.explain("held")
    assert explained is not None
    assert "for its grammar to be ready" in str(explained)
    slow.futures[0].set_result(None)
    assert {update.request_id for update in run(core)} == {"held"}
    assert core.patience_s is None


def test_requests_with_the_same_grammar_wait_for_it_together(core: EngineCore) -> None:
    slow = SlowExecutor(core)
    for name, regex in [("1", "a+"), ("2", "a+"), ("3", "b+")]:
        add(core, name, regex)
    assert len(slow.futures) == 2
    slow.futures[0].set_result(None)
    assert {update.request_id for update in run(core)} == {"1", "2"}
    slow.futures[1].set_result(None)
    assert {update.request_id for update in run(core)} == {"3"}


def test_a_held_request_can_be_aborted(core: EngineCore) -> None:
    slow = SlowExecutor(core)
    add(core, "held", "a+")
    core.scheduler.finish_requests(["held"], "abort", 0.0)
    slow.futures[0].set_result(None)
    run(core)
    assert not core.scheduler.has_unfinished_requests()
    assert core.patience_s is None


def constraints(kind: Kind, directory: Path) -> Constraints:
    config = prepare(EngineConfig.from_args(model=str(write_model_dir(kind, directory)), **NULL), "offline")
    return Constraints(config, kind.tokenizer, end_ids(config, kind.tokenizer, config.arch.vocab_size))


@pytest.mark.parametrize("name", KINDS)
def test_tokenizer_unfit_for_grammars_is_refused(name: str, tmp_path: Path) -> None:
    kind = Kind(name)
    checks = constraints(kind, tmp_path)
    if kind.tokenizer.is_bytewise:
        assert checks.validated(params("a+")).structured_outputs == StructuredOutputsParams(regex="a+")
        vocabulary = vocabulary_of(kind.tokenizer, kind.num_ids, [kind.backend.token_to_id(EOS)])
        assert all(not vocabulary.tokens[token_id] for token_id in kind.special_ids)
    else:
        with pytest.raises(ValidationError, match="depends on its neighbors"):
            checks.validated(params("a+"))
    checks.close()


@pytest.mark.parametrize("name", ["llama_2", "greedy_strip", "unigram", "byte_level", "gemma"])
def test_prompt_without_text_is_refused_if_a_space_would_be_lost(name: str, tmp_path: Path) -> None:
    kind = Kind(name)
    checks = constraints(kind, tmp_path)
    checks.check_prompt([kind.whole_ids[0]])
    only_special = [kind.backend.token_to_id("<s>")]
    if name in ("byte_level", "gemma"):
        checks.check_prompt(only_special)
    else:
        with pytest.raises(ValidationError, match="a prompt that contains text"):
            checks.check_prompt(only_special)


def test_unknown_backend_is_refused_at_start(null_model_dir: Path) -> None:
    config = EngineConfig.from_args(
        model=str(null_model_dir), structured_outputs_config={"backend": "nothing"}
    )
    with pytest.raises(ConfigError, match="must be one of auto, guidance"):
        prepare(config, "offline")


@pytest.mark.parametrize(
    "wrong", [{"backnd": "auto"}, {"compile_timeout_s": 0}, {"cache_mb": "much"}, {"num_checkers": 0}]
)
def test_a_wrong_key_or_value_of_the_option_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--structured-outputs-config: "):
        EngineConfig.from_args(structured_outputs_config=wrong)


def test_an_answer_is_remembered(null_model_dir: Path) -> None:
    engine = LLMEngine(EngineConfig.from_args(model=str(null_model_dir), **NULL))
    checks, asked = engine.input_processor.constraints, list[StructuredOutputsParams]()
    check = checks._checker.checked

    def counted(
        wanted: StructuredOutputsParams, turn: Turn, special: Sequence[str] = ()
    ) -> StructuredOutputsParams:
        asked.append(wanted)
        return check(wanted, turn, special)

    checks._checker.checked = counted  # type: ignore[method-assign]
    for _ in range(3):
        assert checks.known(params("b")) is None or asked
        checks.validated(params("b"))
        with pytest.raises(ValidationError, match="unclosed group"):
            checks.validated(params("("))
    assert [wanted.regex for wanted in asked] == ["b", "("]
    assert checks.known(params("b")) is not None
    engine.shutdown()


@pytest.mark.parametrize("error", [CheckLimitError("too slow", param="x"), UnavailableError("killed")])
def test_refusal_by_circumstances_is_forgotten(null_model_dir: Path, error: QuireError) -> None:
    engine = LLMEngine(EngineConfig.from_args(model=str(null_model_dir), **NULL))
    checks = engine.input_processor.constraints
    check = checks._checker.checked
    for number in range(2):
        wanted = params(f"a{{{number}}}b")

        def failed(*_args: Any) -> StructuredOutputsParams:
            raise error

        checks._checker.checked = failed  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            checks.validated(wanted)
        assert checks.known(wanted) is None
        checks._checker.checked = check  # type: ignore[method-assign]
        assert checks.validated(wanted).structured_outputs == wanted.structured_outputs
    engine.shutdown()


async def test_slow_constraints_of_a_tenant_delay_no_other(null_model_dir: Path) -> None:
    """One checker of two stays free for others, and who waits in vain gets a 503."""
    engine = AsyncLLM(EngineConfig.from_args(model=str(null_model_dir), **NULL), in_process=True)
    checks, goes_on = engine.input_processor.constraints, threading.Event()
    check = checks._checker.checked

    def slow(wanted: StructuredOutputsParams, *args: Any) -> StructuredOutputsParams:
        if str(wanted.regex).startswith("slow"):
            assert goes_on.wait(WAIT_S)
        return check(wanted, *args)

    checks._checker.checked = slow  # type: ignore[method-assign]
    slow_ones = [
        asyncio.ensure_future(
            engine.input_processor.constraints.validated_async(params(f"slow{number}"), "a")
        )
        for number in range(12)
    ]
    for number in range(3):
        settled = await engine.input_processor.constraints.validated_async(params(f"fast{number}"), "b")
        assert settled.structured_outputs == StructuredOutputsParams(regex=f"fast{number}")
    assert not any(one.done() for one in slow_ones)
    checks._checker.max_wait_s = 0.01
    with pytest.raises(UnavailableError, match="constraints of other requests are being checked"):
        await engine.input_processor.constraints.validated_async(params("slow12"), "a")
    goes_on.set()
    assert len({(await one).structured_outputs for one in slow_ones}) == 12
    await engine.shutdown()


async def test_cancelled_check_gives_its_turn_back(null_model_dir: Path) -> None:
    engine = AsyncLLM(EngineConfig.from_args(model=str(null_model_dir), **NULL), in_process=True)
    checks, goes_on, begun = engine.input_processor.constraints, threading.Event(), threading.Event()
    check = checks._checker.checked

    def slow(wanted: StructuredOutputsParams, *args: Any) -> StructuredOutputsParams:
        if wanted.regex == "slow":
            begun.set()
            assert goes_on.wait(WAIT_S)
        return check(wanted, *args)

    checks._checker.checked = slow  # type: ignore[method-assign]
    running, waiting = (
        asyncio.ensure_future(engine.input_processor.constraints.validated_async(params("slow"), "a"))
        for _ in range(2)
    )
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    for one in (running, waiting):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
    goes_on.set()
    assert (
        await engine.input_processor.constraints.validated_async(params("next"), "a")
    ).structured_outputs is not None
    await engine.shutdown()


def test_a_model_without_an_end_cannot_be_constrained(null_model_dir: Path) -> None:
    config = prepare(EngineConfig.from_args(model=str(null_model_dir), **NULL), "offline")
    with pytest.raises(ValidationError, match="end-of-sequence token"):
        Constraints(config, Kind("byte_level").tokenizer, []).validated(params("a"))
    with pytest.raises(ValidationError, match="needs a tokenizer"):
        Constraints(config, None, []).validated(params("a"))


async def test_the_event_loop_goes_on_while_a_constraint_is_checked(null_model_dir: Path) -> None:
    engine = AsyncLLM(EngineConfig.from_args(model=str(null_model_dir), **NULL), in_process=True)
    checks, goes_on = engine.input_processor.constraints, threading.Event()
    checked = checks.validated_in_turn

    def slow(given: SamplingParams, turn: Turn) -> SamplingParams:
        assert goes_on.wait(WAIT_S)
        return checked(given, turn)

    checks.validated_in_turn = slow  # type: ignore[method-assign]
    constrained = engine.generate([1, 2], params("a"), "slow")
    waiting = asyncio.ensure_future(anext(constrained))
    async for output in engine.generate([1, 2], params(None), "fast"):
        assert output.request_id == "fast"
    assert not waiting.done()
    goes_on.set()
    assert (await waiting).request_id == "slow"
    await constrained.aclose()
    await engine.shutdown()


async def test_no_more_constraints_wait_to_be_checked_than_may(null_model_dir: Path) -> None:
    engine = AsyncLLM(EngineConfig.from_args(model=str(null_model_dir), **NULL), in_process=True)
    queue = engine.input_processor.constraints._checker.turns
    for _ in range(MAX_WAITING_OF_TENANT + 2):  # two of them have the checkers
        queue.take("")
    with pytest.raises(UnavailableError, match="wait to be checked"):
        await anext(engine.generate([1, 2], params("a"), "one too many"))
    assert (await anext(engine.generate([1, 2], params(None), "free"))).request_id == "free"
    await engine.shutdown()


def test_core_process_continues_with_a_slow_grammar(null_model_dir: Path) -> None:
    """The null executor has its grammars at once; what is asked for survives both wires."""
    config = EngineConfig.from_args(model=str(null_model_dir), **NULL)
    engine = LLMEngine(dataclasses.replace(config), in_process=False)
    engine.add_request("a", [1, 2], params("a+"))
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    assert last is not None
    assert last.outputs[0].finish_reason == "length"
    engine.shutdown()
