# SPDX-License-Identifier: Apache-2.0
"""The synchronous engine over the null executor: outputs, output kinds, stop strings, aborts, both transports."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.errors import (
    ConfigError,
    ConflictError,
    EngineDeadError,
    ModelLoadError,
    NotFoundError,
    StartupError,
    UnsupportedModelError,
    ValidationError,
)
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.policies import FixedOrder
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from tests.fixtures.quick import quick

PROMPTS = [[1, 2, 3], [4] * 40, [5, 6], list(range(7, 27))]


def make_engine(model_dir: Path, *, in_process: bool = True, **args: Any) -> LLMEngine:
    defaults: dict[str, Any] = {
        "num_gpu_blocks_override": 65,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    args = {"model": str(model_dir), "distributed_executor_backend": "null", **defaults, **args}
    return LLMEngine(EngineConfig.from_args(**args), in_process=in_process)


LOOPS = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "4 steps in flight": {"async_scheduling": True, "max_steps_in_flight": 4},
    "rounds": {"num_scheduler_steps": 5},
}


@pytest.fixture(params=list(LOOPS))
def engine(request: pytest.FixtureRequest, null_model_dir: Path) -> Iterator[LLMEngine]:
    engine = make_engine(null_model_dir, **LOOPS[request.param])
    yield engine
    assert not engine.has_unfinished_requests()
    assert_all_blocks_free(engine)


def assert_all_blocks_free(engine: LLMEngine) -> None:
    engine.call_core("check_integrity")
    stats = engine.call_core("stats")
    assert stats.get("num_running", 0) == stats.get("num_waiting", 0) == stats.get("kv_cache_usage", 0) == 0


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def run_all(
    engine: LLMEngine, params: SamplingParams, prompts: list[list[int]] = PROMPTS
) -> list[RequestOutput]:
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = run(engine)
    return [outputs[str(number)][-1] for number in range(len(prompts))]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **values})


def test_outputs_are_complete(engine: LLMEngine) -> None:
    for output, prompt in zip(run_all(engine, params()), PROMPTS, strict=True):
        (completion,) = output.outputs
        assert output.finished
        assert output.prompt_token_ids == prompt
        assert len(completion.token_ids) == 12
        assert completion.finish_reason == "length"
        assert completion.text == engine.tokenizer.decode(completion.token_ids)  # type: ignore[union-attr]


def test_batch_equals_alone(engine: LLMEngine) -> None:
    together = run_all(engine, params(temperature=1.0, seed=3))
    alone = [run_all(engine, params(temperature=1.0, seed=3), [prompt])[0] for prompt in PROMPTS]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_deltas_join_to_the_cumulative_output(engine: LLMEngine) -> None:
    engine.add_request("delta", [1, 2, 3], params(output_kind=RequestOutputKind.DELTA, logprobs=2))
    engine.add_request("whole", [1, 2, 3], params(logprobs=2))
    outputs = run(engine)
    assert [output.finished for output in outputs["delta"]].count(True) == 1
    joined, *rest = outputs["delta"]
    for output in rest:
        joined.add(output)
    assert len(rest) > 1
    assert joined.outputs == outputs["whole"][-1].outputs


def test_final_only_gives_one_output(engine: LLMEngine) -> None:
    engine.add_request("r", [1, 2, 3], params(output_kind=RequestOutputKind.FINAL_ONLY, n=3))
    (output,) = run(engine)["r"]
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_n_greedy_completions_are_equal(engine: LLMEngine) -> None:
    engine.add_request("r", [1, 2, 3], params(n=2))
    final = run(engine)["r"][-1]
    assert final.outputs[0].token_ids == final.outputs[1].token_ids


def test_stop_string_ends_the_request_and_frees_its_blocks(engine: LLMEngine) -> None:
    (free,) = run_all(engine, params(max_tokens=30), [[1, 2, 3]])
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    for include in (False, True):
        stopping = params(max_tokens=30, stop=[stop], include_stop_str_in_output=include)
        (output,) = run_all(engine, stopping, [[1, 2, 3]])
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == text[: text.find(stop)] + (stop if include else "")
        assert len(completion.token_ids) < 30


def test_stop_token_is_reported_but_is_no_text(engine: LLMEngine) -> None:
    (free,) = run_all(engine, params(), [[1, 2, 3]])
    third = free.outputs[0].token_ids[2]
    (output,) = run_all(engine, params(stop_token_ids=[third]), [[1, 2, 3]])
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
    assert completion.token_ids[-1] == third
    assert completion.text == engine.tokenizer.decode(completion.token_ids[:-1])  # type: ignore[union-attr]


def test_abort_ends_with_one_final_output(engine: LLMEngine) -> None:
    engine.add_request("a", [1, 2, 3], params(max_tokens=100))
    engine.add_request("b", [1, 2, 4], params())
    engine.step()
    engine.abort_request(["a", "unknown"])
    engine.abort_request("a")
    outputs = run(engine)
    assert [output.outputs[0].finish_reason for output in outputs["a"]] == ["abort"]
    assert outputs["b"][-1].outputs[0].finish_reason == "length"


def test_a_bad_request_costs_only_itself(engine: LLMEngine) -> None:
    engine.add_request("good", [1, 2, 3], params())
    with pytest.raises(ValidationError):
        engine.add_request("bad", [10**9], params())
    with pytest.raises(ValidationError, match="already in use"):
        engine.add_request("good", [1], params())
    assert run(engine)["good"][-1].finished


def test_second_run_hits_the_prefix_cache(engine: LLMEngine) -> None:
    cold = run_all(engine, params())
    warm = run_all(engine, params())
    assert [o.num_cached_tokens for o in cold] == [0, 0, 0, 0]
    assert [o.num_cached_tokens for o in warm] == [0, 32, 0, 16]
    assert [o.outputs for o in cold] == [o.outputs for o in warm]
    assert engine.reset_prefix_cache()
    assert all(o.num_cached_tokens == 0 for o in run_all(engine, params()))


def test_preemption_changes_nothing(engine: LLMEngine, null_model_dir: Path) -> None:
    expected = run_all(engine, params(max_tokens=60))
    tiny = make_engine(null_model_dir, num_gpu_blocks_override=10)
    outputs = run_all(tiny, params(max_tokens=60))
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]
    assert tiny.call_core("stats")["num_preemptions"] > 0
    assert_all_blocks_free(tiny)


def test_swap_space_becomes_host_blocks_and_changes_nothing(engine: LLMEngine, null_model_dir: Path) -> None:
    expected = run_all(engine, params(max_tokens=60))
    swapping = make_engine(
        null_model_dir, num_gpu_blocks_override=10, swap_space=0.001, preemption_mode="swap"
    )
    outputs = run_all(swapping, params(max_tokens=60))
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]
    assert swapping.call_core("stats")["num_swaps"] > 0
    assert_all_blocks_free(swapping)


@pytest.mark.parametrize("engine", quick(LOOPS, ["overlapped"]), indirect=True)
def test_a_core_in_its_own_process_gives_the_same(engine: LLMEngine, null_model_dir: Path) -> None:
    remote = make_engine(null_model_dir, in_process=False)
    try:
        sampling = params(temperature=1.0, seed=5, logprobs=1)
        assert [o.outputs for o in run_all(remote, sampling)] == [
            o.outputs for o in run_all(engine, sampling)
        ]
        assert_all_blocks_free(remote)
    finally:
        remote.shutdown()
    remote.shutdown()


def test_a_dead_core_is_reported(null_model_dir: Path) -> None:
    remote = make_engine(null_model_dir, in_process=False)
    # Stopped first, so that it cannot finish the request before it is killed.
    remote._clients[0].process.send_signal(signal.SIGSTOP)  # type: ignore[attr-defined]
    remote.add_request("r", [1, 2, 3], params(max_tokens=100))
    remote._clients[0].process.kill()  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError):
        run(remote)
    remote.shutdown()


@pytest.mark.parametrize("in_process", [True, False])
def test_a_cache_too_small_for_one_request_is_a_startup_error(null_model_dir: Path, in_process: bool) -> None:
    with pytest.raises(StartupError, match="needs 8 KV cache blocks"):
        make_engine(null_model_dir, num_gpu_blocks_override=8, in_process=in_process)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_length_fitted_to_memory_is_known_to_the_front_end(null_model_dir: Path, in_process: bool) -> None:
    engine = make_engine(
        null_model_dir, num_gpu_blocks_override=6, max_model_len="auto", in_process=in_process
    )
    assert engine.config.model.max_model_len == engine.core_ready.max_model_len == 5 * 16
    engine.add_request("r", list(range(70)), params(max_tokens=100))
    assert len(run(engine)["r"][-1].outputs[0].token_ids) == 10
    with pytest.raises(ValidationError, match="context length is 80 tokens"):
        engine.add_request("s", list(range(80)), params())
    engine.shutdown()


def test_startup_errors_name_the_cause(null_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["NopeForCausalLM"], "model_type": "nope"}')
    with pytest.raises(UnsupportedModelError, match=r"NopeForCausalLM.*docs/models\.md.*nearest"):
        make_engine(tmp_path)
    with pytest.raises(ConfigError, match="made for 128 positions"):
        make_engine(null_model_dir, max_model_len=129)
    with pytest.raises(ConfigError, match="at least one token each"):
        make_engine(null_model_dir, max_num_seqs=65)
    with pytest.raises(ConfigError, match="needs --swap-space"):
        make_engine(null_model_dir, preemption_mode="swap")
    with pytest.raises(ConfigError, match="--max-steps-in-flight is 2, which needs --async-scheduling"):
        make_engine(null_model_dir, max_steps_in_flight=2)


class NewestFirst(FixedOrder):
    def rank(self, request: Request) -> float:
        return -request.number


class NewestFirstScheduler(Scheduler):
    policy_class = NewestFirst


def test_a_scheduler_of_the_users_replaces_the_default(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_module", sys.modules[__name__])
    engine = make_engine(null_model_dir, scheduler_cls="users_module:NewestFirstScheduler", max_num_seqs=1)
    for name in "abc":
        engine.add_request(name, [1, 2, 3], params(output_kind=RequestOutputKind.FINAL_ONLY), priority=1)
    ends = []
    while engine.has_unfinished_requests():
        ends += [output.request_id for output in engine.step()]
    assert ends == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:X", "cannot import"),
        ("quire", "cannot import"),
        ("quire.config:EngineConfig", "not a subclass"),
    ],
)
def test_a_bad_scheduler_class_is_a_startup_error(null_model_dir: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(null_model_dir, scheduler_cls=name)


def test_explain_names_the_cause_of_a_wait(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, max_num_seqs=1)
    engine.add_request("long", [3, 4], params(max_tokens=60))
    engine.add_request("two", [4, 5], params(n=2))
    engine.step()
    assert [one.cause for one in engine.explain("long")] == [None]
    assert [(one.request_id, one.cause) for one in engine.explain("two")] == [
        ("two-1.0", "sequence_cap"),
        ("two-1.1", "shared_prompt"),
    ]
    for one in engine.explain("two"):
        assert sum(share.duration_ns for share in one.shares) == one.waited_ns > 0
    assert "two-1.1 (waiting, 0 ahead of it) waited 0." in str(engine.explain("two")[1])
    run(engine)
    assert [one.status for one in engine.explain("two")] == ["finished", "finished"]
    with pytest.raises(NotFoundError, match="nobody"):
        engine.explain("nobody")


def test_late_output_of_an_aborted_request_spares_its_reused_id(null_model_dir: Path) -> None:
    """As it happens with a core in another process, whose reports may be on their way while a request is aborted."""
    engine = make_engine(null_model_dir)
    engine.add_request("again", [7, 8, 9], params())
    late = engine._clients[0].receive()
    assert late[0].updates[0].new_token_ids  # type: ignore[union-attr]
    engine.abort_request("again")
    (aborted,) = engine.step()
    assert (aborted.outputs[0].token_ids, aborted.outputs[0].finish_reason) == ([], "abort")
    engine.add_request("again", [1, 2, 3], params())
    for message in late:
        engine._front_end.take_in(0, message)
    result = run(engine)["again"][-1]
    engine.add_request("alone", [1, 2, 3], params())
    assert result.outputs == run(engine)["alone"][-1].outputs
    assert_all_blocks_free(engine)


def test_deadline_ends_a_request_and_frees_its_blocks(engine: LLMEngine) -> None:
    engine.add_request("late", [1, 2, 3], params(), timeout_s=1e-9)
    engine.add_request("other", [1, 2, 3], params(), timeout_s=1e9)
    outputs = run(engine)
    assert outputs["late"][-1].outputs[0].finish_reason == "timeout"
    assert len(outputs["other"][-1].outputs[0].token_ids) == 12


def test_two_cores_match_one_core(null_model_dir: Path, engine: LLMEngine) -> None:
    args = {"distributed_executor_backend": "null", "max_num_seqs": 4, "data_parallel_size": 2}
    two = LLMEngine(EngineConfig.from_args(model=str(null_model_dir), **args), in_process=True)
    sampling = params(temperature=1.0, seed=5, n=2)
    assert [o.outputs for o in run_all(two, sampling)] == [o.outputs for o in run_all(engine, sampling)]
    for core in range(2):
        assert two._call(core, "stats").get("num_running", 0) == 0
    assert two.reset_prefix_cache()
    assert [one.status for one in two.explain("1")] == ["finished", "finished"]
    two.shutdown()


@pytest.mark.parametrize("steps", [[1], [5], [12], range(1, 13)])
def test_interrupt_in_a_step_loses_no_output(
    steps: Sequence[int], null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that catches it and goes on, as a notebook does; twelve steps make twelve tokens."""
    engine = make_engine(null_model_dir)
    (expected,) = run_all(engine, params(), [[1, 2, 3]])
    core, num_calls = engine._clients[0]._core, 0  # type: ignore[attr-defined]
    original = core.step

    def interrupted() -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in steps:
            signal.raise_signal(signal.SIGINT)
        return original()

    monkeypatch.setattr(core, "step", interrupted)
    engine.add_request("r", [1, 2, 3], params())
    outputs: list[RequestOutput] = []
    num_interrupts = 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert (outputs[-1].outputs, num_interrupts) == (expected.outputs, len(steps))


def test_interrupt_while_adding_leaves_a_request_whole_or_none(
    null_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(null_model_dir)
    process = engine.input_processor.process

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return process(*args, **options)

    monkeypatch.setattr(engine.input_processor, "process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.add_request("r", [1, 2, 3], params())
    assert len(run(engine)["r"][-1].outputs[0].token_ids) == 12


def test_a_second_thread_at_once_is_refused(null_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(null_model_dir)
    core = engine._clients[0]._core  # type: ignore[attr-defined]
    entered, leave = threading.Event(), threading.Event()
    original = core.step

    def slow() -> Any:
        entered.set()
        assert leave.wait(60)
        return original()

    monkeypatch.setattr(core, "step", slow)
    engine.add_request("r", [1, 2, 3], params())
    outputs: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(engine.step()))
    thread.start()
    assert entered.wait(60)
    attempts: list[Callable[[], Any]] = [
        engine.step,
        engine.reset_prefix_cache,
        lambda: engine.add_request("s", [1], params()),
        lambda: engine.abort_request("r"),
        lambda: engine.explain("r"),
    ]
    for attempt in attempts:
        with pytest.raises(ConflictError, match="in use by another thread"):
            attempt()
    leave.set()
    thread.join()
    outputs += run(engine)["r"]
    assert len(outputs[-1].outputs[0].token_ids) == 12


@pytest.mark.parametrize("engine_class", [LLMEngine, AsyncLLM])
def test_a_constructor_that_fails_leaves_no_core_behind(
    engine_class: Any, null_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("quire.engine.client.subprocess.Popen", remembered)
    (tmp_path / "config.json").write_bytes((null_model_dir / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    config = EngineConfig.from_args(model=str(tmp_path), distributed_executor_backend="null")
    with pytest.raises(ModelLoadError, match="not a valid tokenizer file"):
        engine_class(config, in_process=False)
    assert all(process.poll() is not None for process in started)


def test_nothing_waits_for_an_engine_that_was_shut_down(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir)
    engine.add_request("r", [1, 2], params())
    engine.shutdown()
    engine.shutdown()
    for ask in (engine.step, engine.reset_prefix_cache, lambda: engine.add_request("s", [1], params())):
        with pytest.raises(EngineDeadError, match="was shut down"):
            ask()


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_step_of_default_engine_returns_one_token_per_request(
    null_model_dir: Path, kind: RequestOutputKind
) -> None:
    """Several decode steps per plan are for outputs that are read as a whole, and for those who ask."""
    args = {"num_scheduler_steps": 16, "multi_step_streams": False}  # the default offline, on a CPU
    engine = make_engine(null_model_dir, **args)
    for number, prompt in enumerate(PROMPTS[:3:2]):
        engine.add_request(str(number), prompt, params(output_kind=kind))
    seen = {"0": 0, "1": 0}
    while engine.has_unfinished_requests():
        for output in engine.step():
            length = len(output.outputs[0].token_ids)
            expected = 1 if kind is RequestOutputKind.DELTA else seen[output.request_id] + 1
            assert length == expected
            seen[output.request_id] += 1
    assert seen == {"0": 12, "1": 12}
    engine.shutdown()


def test_whole_outputs_of_default_engine_use_multi_step_decode(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, num_scheduler_steps=16, multi_step_streams=False)
    engine.add_request("0", [1, 2, 3], params(output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=60))
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
    assert num_steps < 30
    engine.shutdown()
