# SPDX-License-Identifier: Apache-2.0
"""The front end without any I/O: messages are handed to cores in this process, lost, or never sent."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.front_end import FrontEnd, Outgoing
from quire.engine.messages import AbortRequests, AddRequest, CoreMessage, CoreRequest
from quire.engine.startup import prepare
from quire.errors import EngineDeadError, EngineError, ValidationError
from quire.kv_cache.hashing import ExtraKeys
from quire.metrics.stats import IterationStats, StatLogger
from quire.outputs import RequestOutput
from quire.routing.router import LongestPrefix, LruSet, RoutedRequest
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import SchedulerStats
from tests.engine.test_state_machine import parameters, prompts
from tests.engine.whole_engine import WholeEngine, alone, letters_model
from tests.fixtures.folded import folded


class Cores:
    """A front end, its cores, and a clock that only the test moves."""

    def __init__(self, num_cores: int = 1, **args: Any) -> None:
        defaults: dict[str, Any] = {"distributed_executor_backend": "null", "max_num_seqs": 8}
        model = args.pop("model", None) or str(letters_model(None))
        config = EngineConfig.from_args(model=model, **defaults | args)
        self.config = prepare(config, "offline")
        self.now = 100.0
        self.front_end = FrontEnd(self.config, num_cores=num_cores, clock=lambda: self.now)
        self.outputs: dict[str, list[RequestOutput | Exception]] = {}
        self.sent: list[Outgoing] = []
        self.core_config = dataclasses.replace(self.config, tells_cache=num_cores > 1)
        self.cores = [EngineCore(self.core_config) for _ in range(num_cores)]
        for index, core in enumerate(self.cores):
            self.front_end.take_in(index, core.ready)

    def add(self, label: str, prompt: Any, **params: Any) -> str:
        options = {name: params.pop(name) for name in ("timeout_s", "data_parallel_rank") if name in params}
        outputs = self.outputs.setdefault(label, [])
        tokenized = self.front_end.input_processor.tokenize(prompt)
        name, messages = self.front_end.submit(
            label, tokenized, SamplingParams(**params), outputs.append, **options
        )
        self.send(messages)
        return name

    def send(self, messages: list[Outgoing]) -> None:
        for index, message in messages:
            self.sent.append((index, message))
            answer = self.cores[index].handle(over_the_wire(message, CoreRequest))
            if answer is not None:
                self.send(self.front_end.take_in(index, answer))

    def step(self) -> None:
        for index, core in enumerate(self.cores):
            if core.has_work():
                self.send(self.front_end.take_in(index, over_the_wire(core.step(), CoreMessage)))

    def run(self) -> None:
        for _ in range(500):
            if not self.front_end.num_unfinished:
                return
            self.step()
        raise AssertionError("the requests do not come to an end")

    def replace(self, index: int) -> None:
        """The core dies, the others go on with what it had, and a new one takes its place."""
        self.cores[index].shutdown()
        self.send(self.front_end.lose(index, [], EngineError("the core died")))
        self.cores[index] = EngineCore(self.core_config)
        self.send(self.front_end.unfinished(index))
        self.front_end.take_in(index, self.cores[index].ready)

    def last(self, label: str) -> RequestOutput:
        output = self.outputs[label][-1]
        assert isinstance(output, RequestOutput)
        assert output.finished
        return output


def over_the_wire(message: Any, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def result(output: RequestOutput) -> tuple[Any, ...]:
    return output.outputs, output.prompt_logprobs, output.prompt_token_ids


# Several cores


def test_request_and_forks_go_to_the_core_with_fewest_sequences() -> None:
    cores = Cores(num_cores=2)
    for label, n in (("a", 3), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
        cores.add(label, [1, 2, 3], n=n, max_tokens=6, ignore_eos=True, seed=1)
    sent = [
        (core, message.request.request_id) for core, message in cores.sent if isinstance(message, AddRequest)
    ]
    assert sent == [(0, "a-0.0"), (1, "b-1"), (1, "c-2"), (1, "d-3"), (0, "e-4")]
    cores.run()
    one = Cores()
    for label, n in (("a", 3), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
        one.add(label, [1, 2, 3], n=n, max_tokens=6, ignore_eos=True, seed=1)
    one.run()
    assert {label: result(cores.last(label)) for label in "abcde"} == {
        label: result(one.last(label)) for label in "abcde"
    }
    cores.add("f", [1], max_tokens=1)
    assert cores.sent[-1][0] == 0, "all that has ended is no work"


def test_request_goes_to_its_named_replica_while_that_is_up() -> None:
    cores = Cores(num_cores=2, data_parallel_size=2)
    params = {"max_tokens": 2, "ignore_eos": True}
    for _ in range(3):
        cores.add("a", [1, 2, 3], data_parallel_rank=1, **params)
    assert [core for core, _ in cores.sent] == [1, 1, 1]
    with pytest.raises(ValidationError, match="data_parallel_rank is 2, and replicas here are 0, 1"):
        cores.add("b", [1], data_parallel_rank=2, **params)
    cores.front_end.lose(1, [], EngineError("the core died"))
    cores.add("c", [1], data_parallel_rank=1, **params)
    assert cores.sent[-1][0] == 0


def test_core_cache_contents_are_tracked_until_cleared() -> None:
    """Whoever has sent it there: what this front end has sent is forgotten here."""
    cores, ids = Cores(num_cores=2, data_parallel_size=2), [1] * 33
    cores.add("a", ids, max_tokens=1, data_parallel_rank=1)
    cores.run()
    policy = cores.front_end.router._policy
    assert isinstance(policy, LongestPrefix)
    policy._prefixes[1]._sent = LruSet(0)

    def num_uncached(core: int) -> int:
        return policy.num_uncached(RoutedRequest(ids, 1, ExtraKeys(None)), core)

    num_cached = len(ids) // cores.config.cache.block_size * cores.config.cache.block_size
    assert (num_uncached(0), num_uncached(1)) == (33, 33 - num_cached)
    _, messages = cores.front_end.call(1, "reset_prefix_cache")
    cores.send(messages)
    cores.add("b", [2], max_tokens=1, data_parallel_rank=1)
    cores.run()
    assert num_uncached(1) == 33


def test_core_answers_its_own_calls_and_ends_its_own_requests() -> None:
    cores = Cores(num_cores=2)
    for label in "ab":
        cores.add(label, [1, 2], max_tokens=30, ignore_eos=True)
    cores.step()
    running = []
    for index in range(2):
        answer, messages = cores.front_end.call(index, "stats")
        assert not answer.done()
        assert cores.front_end.expects(index)
        cores.send(messages)
        running.append(answer.result()["num_running"])
    assert running == [1, 1]
    ends = cores.front_end.abort(["a", "b", "nobody"])
    assert ends == [(0, AbortRequests(["a-0"], "abort")), (1, AbortRequests(["b-1"], "abort"))]
    assert not cores.front_end.expects(0)
    refused, messages = cores.front_end.call(1, "nope")
    cores.send(messages)
    with pytest.raises(EngineError, match="no utility 'nope'"):
        refused.result()


# The wire


def test_completions_of_one_prompt_cross_the_wire_once() -> None:
    cores = Cores()
    cores.add("r", [1] * 30, n=8, max_tokens=4, temperature=1.0, seed=5)
    ((_, message),) = cores.sent
    assert msgspec.msgpack.encode(message).count(bytes([1] * 30)) == 1
    assert isinstance(message, AddRequest)
    assert [request.sampling_params.seed for request in message.requests()] == list(range(5, 13))
    cores.run()


def test_the_callers_list_is_copied_once() -> None:
    cores = Cores()
    prompt = [1, 2, 3]
    cores.add("r", prompt, max_tokens=4, ignore_eos=True)
    cores.add("s", {"prompt_token_ids": prompt}, max_tokens=4, ignore_eos=True)
    prompt[:] = [10**9] * 50
    cores.run()
    for label in "rs":
        assert cores.last(label).prompt_token_ids == [1, 2, 3]
        assert cores.last(label).outputs[0].finish_reason == "length"


def test_core_receives_the_finish_reason_of_a_sequence() -> None:
    cores = Cores()
    told: list[tuple[list[str], str]] = []
    finish = cores.cores[0].scheduler.finish_requests

    def remembered(names: Any, reason: str, now: float) -> Any:
        told.append((list(names), reason))
        return finish(names, reason, now)

    cores.cores[0].scheduler.finish_requests = remembered  # type: ignore[method-assign]
    cores.add("alone", [1, 2, 3], max_tokens=20, ignore_eos=True, seed=1)
    cores.run()
    text = cores.last("alone").outputs[0].text
    cores.add("stop", [1, 2, 3], max_tokens=20, ignore_eos=True, seed=1, stop=text[2:4])
    cores.add("left", [1, 2, 3], max_tokens=20, ignore_eos=True, seed=1)
    cores.run()
    cores.send(cores.front_end.release(cores.add("left", [4], max_tokens=20)))
    assert told == [(["stop-1"], "stop"), (["left-3"], "abort")]


# Deadlines


def test_request_ends_at_its_deadline_with_its_tokens() -> None:
    cores = Cores()
    cores.add("late", [1, 2, 3], max_tokens=30, ignore_eos=True, n=2, seed=3, timeout_s=5)
    cores.add("other", [1, 2, 3], max_tokens=12, ignore_eos=True)
    cores.add("first", [1, 2], max_tokens=1, timeout_s=1)
    assert cores.front_end.next_deadline == 101.0
    for _ in range(4):
        cores.step()
    assert cores.front_end.next_deadline == 105.0, "what has ended has no deadline"
    assert cores.front_end.expire(104.9) == []
    cores.now = 105.0
    cores.send(cores.front_end.expire(105.0))
    late = cores.last("late")
    assert [completion.finish_reason for completion in late.outputs] == ["timeout", "timeout"]
    assert [len(completion.token_ids) for completion in late.outputs] == [4, 3]
    assert late.outputs[0].text
    assert cores.front_end.next_deadline is None
    cores.run()
    assert len(cores.last("other").outputs[0].token_ids) == 12
    while cores.cores[0].has_work():
        cores.step()
    cores.cores[0].scheduler.check_integrity()
    assert cores.cores[0].scheduler.stats().kv_cache_usage == 0


@pytest.mark.item(36)
def test_a_request_that_waits_ends_at_its_deadline_too() -> None:
    cores = Cores(max_num_seqs=1)
    cores.add("long", [1], max_tokens=20, ignore_eos=True)
    cores.add("waits", [1], max_tokens=20, timeout_s=2.5)
    cores.step()
    cores.send(cores.front_end.expire(102.5))
    assert cores.last("waits").outputs[0].finish_reason == "timeout"
    cores.run()


@folded("timeout_s", [0, -1.0, float("inf"), float("nan"), "3", True])
def test_a_bad_timeout_is_refused(timeout_s: Any) -> None:
    cores = Cores()
    with pytest.raises(ValidationError, match="timeout_s must be a positive number"):
        cores.add("r", [1], timeout_s=timeout_s)
    assert len(cores.front_end) == 0


# Errors of ours


class Panic(BaseException):
    """As a library that is written in Rust raises them."""


def test_timeout_is_refused_if_each_rank_has_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = Cores()
    launched = cores.config.evolve(distributed_executor_backend="external_launcher")
    monkeypatch.setattr(cores.front_end, "config", launched)
    with pytest.raises(
        ValidationError, match=r"timeout_s is not for ranks of external_launcher, .* max_tokens"
    ) as bad:
        cores.add("late", [1, 2, 3], timeout_s=1.0)
    assert bad.value.param == "timeout_s"
    cores.add("other", [1, 2, 3])
    cores.run()


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize(
    "method", ["_append_tokens", "_record_history", "_record_tokens", "completion", "_finish"]
)
def test_error_in_one_sequence_spares_its_neighbors(
    method: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(culprit: str | None) -> tuple[Cores, list[tuple[Any, ...]]]:
        cores = Cores()
        for index in range(4):
            cores.add(f"r{index}", [index, 7], max_tokens=8, ignore_eos=True, logprobs=1)
        steps = itertools.count()
        if culprit is not None:
            sequence, _ = cores.front_end.output_processor._running[culprit]
            original = getattr(sequence, method)

            def broken(*args: Any) -> Any:
                if next(steps) == (0 if method == "_finish" else 3):
                    raise error("a bug")
                return original(*args)

            monkeypatch.setattr(sequence, method, broken)
        cores.run()
        return cores, [result(cores.last(f"r{index}")) for index in range(4)]

    _, expected = run(None)
    cores, got = run("r1-1")
    assert [got[index] for index in (0, 2, 3)] == [expected[index] for index in (0, 2, 3)]
    (completion,) = cores.last("r1").outputs
    assert (completion.finish_reason, completion.stop_reason) == (
        "error",
        "the engine failed while it made the output",
    )
    assert sum(isinstance(one, RequestOutput) and one.finished for one in cores.outputs["r1"]) == 1
    if method != "_finish":  # by then the core has ended it
        assert (0, AbortRequests(["r1-1"], "error")) in cores.sent
    assert len(cores.front_end) == 0


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    """With drafts, several tokens come at once, and the string may end within them."""
    params, engine = (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        WholeEngine(max_drafts=8),
    )
    letters = dict.fromkeys(alone([1, 2, 3], params).outputs[0].text)
    for letter in letters:
        engine.add(letter, [1, 2, 3], params.clone(stop=letter))
    engine.drain(max_steps=500)
    assert engine.num_accepted > 0
    told = [engine.result(letter) for letter in letters]
    assert engine.num_generated == sum(len(output.outputs[0].token_ids) for output in told)


def test_failing_stat_logger_is_logged_once_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StatLogger):
        def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
            raise ZeroDivisionError

    class Counting(StatLogger):
        num_tokens = 0

        def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
            self.num_tokens += iteration.num_generation_tokens

    cores, counting = Cores(), Counting()
    for stat_logger in (Broken(), counting):
        cores.front_end.stat_loggers.add(stat_logger)
    cores.add("r", [1], max_tokens=8, ignore_eos=True)
    with caplog.at_level(logging.ERROR):
        cores.run()
    assert len(cores.last("r").outputs[0].token_ids) == counting.num_tokens == 8
    assert [record.levelname for record in caplog.records].count("ERROR") == 1


def test_dead_engine_fails_requests_once_and_refuses_new_ones() -> None:
    cores = Cores(num_cores=2)
    for label in "abc":
        cores.add(label, [1], n=2, max_tokens=9)
    answer, _ = cores.front_end.call(1, "stats")
    error = EngineDeadError("gone")
    cores.front_end.die(error)
    cores.front_end.die(EngineDeadError("again"))
    assert all(cores.outputs[label] == [error] for label in "abc")
    assert answer.exception() is error
    for attempt in (lambda: cores.add("d", [1]), lambda: cores.front_end.call(0, "stats")):
        with pytest.raises(EngineDeadError, match="gone"):
            attempt()
    assert len(cores.front_end) == cores.front_end.num_unfinished == 0


# A core that is replaced


def test_requests_of_a_lost_core_resume_on_others_at_once() -> None:
    cores = Cores(num_cores=2)
    for label in "abcd":
        cores.add(label, [1, 2], max_tokens=30, ignore_eos=True)
    cores.step()
    cores.sent.clear()
    cores.send(cores.front_end.lose(0, [], EngineError("the core died")))
    moved = [message.request.request_id for core, message in cores.sent if isinstance(message, AddRequest)]
    assert moved == ["a-0", "c-2"]
    assert {core for core, _ in cores.sent} == {1}
    cores.add("e", [1, 2], max_tokens=3)
    assert cores.sent[-1][0] == 1
    assert not cores.front_end.in_flight(0)
    assert cores.front_end.locate_sequences("a") == [(1, "a-0")]
    cores.run()
    assert cores.front_end.locate_sequences("a") == [(1, "a-0")], "of those that are there"
    assert cores.front_end.unfinished(0) == []


def test_a_core_that_seems_to_hang_is_passed_by_unless_all_do() -> None:
    cores = Cores(num_cores=2)
    hanging = {0}
    cores.front_end._stalls = hanging.__contains__
    for label in "ab":
        cores.add(label, [1], max_tokens=3)
    hanging.add(1)
    cores.add("c", [1], max_tokens=3)
    assert [core for core, _ in cores.sent] == [1, 1, 0]


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([3, 1, 4, 1, 5, 9, 2, 6], {"temperature": 0.0, "logprobs": 2}),
    ([3, 1, 4, 1, 5], {"n": 3, "seed": 4, "logprobs": 1, "output_kind": RequestOutputKind.FINAL_ONLY}),
    ([2, 7] * 6, {"seed": 9, "prompt_logprobs": 2, "n": 2}),
    ([2, 7] * 5, {"seed": 1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}),
    ([8] * 3, {"seed": 2, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(20))}),
    ([5, 6], {"seed": 3, "output_kind": RequestOutputKind.DELTA, "prompt_logprobs": 0}),
    ([1] * 20, {"seed": 8, "max_tokens": 1, "prompt_logprobs": 1}),
]


def run_all(cores: Cores, stop: str | None, drops: Iterator[bool]) -> list[tuple[Any, ...]]:
    for index, (prompt, params) in enumerate(REQUESTS):
        with_stop = {"stop": stop} if stop and index == 0 else {}
        cores.add(f"r{index}", prompt, **{"max_tokens": 14, "ignore_eos": True} | params | with_stop)
    while cores.front_end.num_unfinished:
        cores.step()
        if next(drops):
            cores.replace(0)
    return [joined(cores.outputs[f"r{index}"], params) for index, (_, params) in enumerate(REQUESTS)]


def joined(outputs: list[Any], params: dict[str, Any]) -> tuple[Any, ...]:
    """Join a request's outputs into the final result, with the prompt's part of the first output."""
    last = outputs[-1]
    if params.get("output_kind") is RequestOutputKind.DELTA:
        last = dataclasses.replace(outputs[0])
        for output in outputs[1:]:
            last.add(output)
    return result(last)


def undisturbed() -> Iterator[bool]:
    return itertools.repeat(False)


@pytest.mark.parametrize(("backend", "every"), [("null", 1), ("null", 3), ("null", 7), ("tiny", 4)])
def test_replaced_core_changes_no_output(backend: str, every: int, tiny_model: Callable[[str], Path]) -> None:
    """Small steps, so that cores die while prompts are computed, too."""
    args: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_model_len": 40}
    if backend == "tiny":
        args |= {"model": str(tiny_model("llama")), "distributed_executor_backend": "uni"}
        args |= {"num_gpu_blocks_override": 40}
    text = run_all(Cores(**args), None, undisturbed())[0][0][0].text
    expected = run_all(Cores(**args), text[5:7], undisturbed())
    assert expected[0][0][0].finish_reason == "stop"
    drops = (number % (every + 1) == every for number in itertools.count())
    assert run_all(Cores(**args), text[5:7], drops) == expected


@pytest.mark.item(43)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(prompts(), parameters()), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from([{}, {"async_scheduling": True, "max_steps_in_flight": 3}, {"num_scheduler_steps": 4}]),
    st.sampled_from([6, 24]),
    st.integers(1, 3),
)
def test_cores_replaced_at_any_time_change_no_output(
    requests: list[tuple[list[int], SamplingParams]],
    drops: list[int],
    loop: dict[str, Any],
    budget: int,
    num_cores: int,
) -> None:
    """Each number of `drops` is how many steps go by until a core dies, each in its turn."""
    cores = Cores(num_cores, max_num_batched_tokens=budget, max_num_seqs=4, block_size=4, **loop)
    for index, (prompt, params) in enumerate(requests):
        cores.add(f"r{index}", prompt, **msgspec.structs.asdict(params))
    for index, num_steps in enumerate(drops):
        for _ in range(num_steps):
            cores.step()
        cores.replace(index % num_cores)
    cores.run()
    for index, (prompt, params) in enumerate(requests):
        outputs = cores.outputs[f"r{index}"]
        got = joined(outputs, {"output_kind": params.output_kind})
        expected = alone(prompt, params)
        assert sorted(got[0], key=lambda completion: completion.index) == expected.outputs
        assert got[1] == expected.prompt_logprobs


def test_calls_in_flight_are_sent_again_to_the_new_core() -> None:
    cores = Cores()
    answer, _ = cores.front_end.call(0, "check_integrity")
    cores.replace(0)
    assert answer.done()
