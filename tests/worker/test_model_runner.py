# SPDX-License-Identifier: Apache-2.0
"""The runner with an exact toy model: the same result however the work is cut and whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import EngineError
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.output import STEP_PROTOCOL_VERSION, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.worker.cpu import CpuDevice
from tests.fixtures.folded import folded
from tests.worker.harness import NUM_BLOCKS, POISON, VOCAB_SIZE, Driver, Sequence, request, toy_runner

GREEDY = SamplingParams(temperature=0, max_tokens=99, logprobs=2, prompt_logprobs=1)
KINDS = [
    GREEDY,
    SamplingParams(seed=5, max_tokens=99, logprobs=0),
    SamplingParams(
        seed=9, max_tokens=99, top_p=0.8, frequency_penalty=0.7, repetition_penalty=1.1, logprobs=3
    ),
    SamplingParams(seed=-3, max_tokens=99, top_k=5, temperature=0.6, min_tokens=4, prompt_logprobs=-1),
]
NUM_OUTPUT = 6


def prompt(length: int, seed: int) -> list[int]:
    """Tokens without the poison."""
    return [random.Random(seed * 1000 + i).randrange(POISON) for i in range(length)]


def params(kind: int) -> SamplingParams:
    """Never samples the poison."""
    return KINDS[kind].clone(logit_bias={POISON: -100.0})


def alone(length: int, seed: int, kind: int) -> Sequence:
    driver = Driver(toy_runner())
    driver.submit("a", prompt(length, seed), params(kind))
    return driver.generate("a", NUM_OUTPUT)


def result(sequence: Sequence) -> tuple[Any, ...]:
    return sequence.token_ids, sequence.logprobs, sequence.prompt_logprobs


@folded("kind", range(len(KINDS)))
@folded("chunk", [1, 3, 4, 7])
def test_chunked_equals_whole(kind: int, chunk: int) -> None:
    driver = Driver(toy_runner(), seed=chunk)
    driver.submit("a", prompt(13, 1), params(kind))
    assert result(driver.generate("a", NUM_OUTPUT, chunk)) == result(alone(13, 1, kind))


@settings(derandomize=True, max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_any_company_chunking_and_preemption_equals_alone(seed: int) -> None:
    """Requests come, go, are cut and preempted at random; each gets what it gets alone."""
    rng = random.Random(seed)
    driver = Driver(toy_runner(max_num_seqs=4), seed)
    waiting = [(rng.randint(1, 12), number, rng.randrange(len(KINDS))) for number in range(7)]
    expected = {f"r{number}": alone(*spec) for number, spec in enumerate(waiting)}
    running: set[str] = set()
    while waiting or running:
        while waiting and len(running) < 4 and rng.random() < 0.7:
            length, number, kind = waiting.pop()
            driver.submit(f"r{number}", prompt(length, number), params(kind))
            running.add(f"r{number}")
        picked = [name for name in sorted(running, key=lambda _: rng.random()) if rng.random() < 0.8]
        for name in [name for name in picked if rng.random() < 0.1]:
            driver.preempt(name)
            driver.sequences[name].prompt_logprobs.clear()  # they come again
        driver.step({name: rng.randint(1, _pending(driver.sequences[name])) for name in picked})
        for name in [name for name in picked if len(driver.sequences[name].output) == NUM_OUTPUT]:
            assert result(driver.finish(name)) == result(expected[name])
            running.remove(name)
    driver.step({})
    assert len(driver.runner.batch) == 0


def _pending(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed_tokens


def planned(name: str, start: int, num_tokens: int, drafts: Iterable[int] = ()) -> ScheduledRequest:
    """One that samples behind its last token, and behind its drafts."""
    drafts = list(drafts)
    return ScheduledRequest(name, start, num_tokens, 1 + len(drafts), [], drafts)


def test_prefix_hit_starts_behind_the_cached_tokens() -> None:
    """Blocks that another request has filled are read, not computed again."""
    driver = Driver(toy_runner())
    first = driver.submit("a", prompt(11, 1), params(0).clone(prompt_logprobs=None))
    driver.generate("a", 1)
    second = driver.submit("b", prompt(11, 1), first.params)
    second.block_ids, second.num_computed_tokens = first.block_ids[:2], 8
    assert driver.generate("b", 1).output == first.output


def test_prompt_logprobs_cover_all_but_the_first_token() -> None:
    sequence = alone(9, 2, 0)
    assert len(sequence.prompt_logprobs) == 8
    assert [entry.token_ids[0] for entry in sequence.prompt_logprobs] == sequence.token_ids[1:9]
    assert all(len(entry.token_ids) == 2 for entry in sequence.prompt_logprobs)


def test_one_token_prompt_has_no_prompt_logprobs() -> None:
    driver = Driver(toy_runner())
    driver.submit("a", [3], params(0))
    assert driver.step({"a": 1}).prompt_logprobs == {}


def test_prompt_logprobs_are_the_same_in_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = alone(13, 4, 0)
    monkeypatch.setattr(CpuDevice, "logits_elements", 2 * VOCAB_SIZE)
    assert result(alone(13, 4, 0)) == result(whole)


def test_many_sampling_rows_are_the_same_in_small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[list[int]]:
        driver = Driver(toy_runner())
        for number in range(5):
            driver.submit(f"r{number}", prompt(4, number), params(number % len(KINDS)))
        for _ in range(3):
            driver.step({name: _pending(sequence) for name, sequence in driver.sequences.items()})
        return [sequence.token_ids for sequence in driver.sequences.values()]

    whole = run()
    monkeypatch.setattr(CpuDevice, "logits_elements", 2 * VOCAB_SIZE)
    assert run() == whole


@pytest.mark.item(47)
def test_non_finite_logits_fail_one_request() -> None:
    driver = Driver(toy_runner())
    driver.submit("good", prompt(5, 1), params(1))
    driver.submit("bad", [1, 2, POISON], params(1))
    output = driver.step({"bad": 3, "good": 5})
    assert output.failed == {"bad": "the model produced non-finite logits"}
    assert list(output.sampled_token_ids) == ["good"]
    assert list(output.logprobs) == ["good"]
    driver.finish("bad")
    assert driver.generate("good", NUM_OUTPUT).token_ids == alone(5, 1, 1).token_ids


def test_non_finite_prompt_logits_fail_the_request() -> None:
    driver = Driver(toy_runner())
    driver.submit("bad", [1, POISON, 2, 3], params(0))
    output = driver.step({"bad": 4})
    assert list(output.failed) == ["bad"]
    assert (output.sampled_token_ids, output.prompt_logprobs) == ({}, {})


@folded(
    ("bad", "message"),
    [
        (request([1, VOCAB_SIZE], request_id="bad"), "token id 23 is not in the vocabulary of 23"),
        (request([-1], request_id="bad"), "token id -1"),
        (request([1] * 65, request_id="bad"), "65 tokens, the limit is 1 to 64"),
        (request([], request_id="bad"), "0 tokens"),
        (
            request([1], SamplingParams(temperature=0, allowed_token_ids=[99]), request_id="bad"),
            "allowed_token_ids 99",
        ),
        (
            request([1], SamplingParams(temperature=0, logit_bias={-7: 1.0}), request_id="bad"),
            "logit_bias -7",
        ),
        (
            NewRequestData("bad", [1, 2], 3, SamplingParams(temperature=0), [[1]], 0),
            "3 prompt tokens of 2 tokens",
        ),
    ],
)
def test_unusable_request_fails_alone(bad: NewRequestData, message: str) -> None:
    runner = toy_runner()
    good = request([1, 2], request_id="good", block_ids=[5])
    plan = SchedulerOutput(0, [bad, good], [planned("bad", 0, 1), planned("good", 0, 2)], [])
    output = runner.execute_model(plan)
    assert message in output.failed["bad"]
    assert list(output.sampled_token_ids) == ["good"]
    both = [planned("good", 2, 1), planned("bad", 1, 1)]
    in_flight = runner.execute_model(SchedulerOutput(1, [], both, []))
    assert (list(in_flight.sampled_token_ids), list(in_flight.failed)) == (["good"], ["bad"])
    after = SchedulerOutput(2, [], [planned("good", 3, 1)], ["bad"])
    assert list(runner.execute_model(after).sampled_token_ids) == ["good"]
    assert not runner.execute_model(SchedulerOutput(3, [], [], ["good"])).failed


def test_model_without_pooler_fails_only_pooling_requests() -> None:
    runner, pooling = toy_runner(), PoolingParams()
    wanting = msgspec.structs.replace(request([1, 2], request_id="wanting"), pooling_params=pooling)
    new = [wanting, request([3], request_id="other", block_ids=[3])]
    pools = ScheduledRequest("wanting", 0, 2, 0, [], pools=True)
    output = runner.execute_model(SchedulerOutput(0, new, [pools, planned("other", 0, 1)], []))
    assert output.failed == {"wanting": "the model has no pooler"}
    assert (list(output.sampled_token_ids), output.pooled) == (["other"], {})


def test_plan_of_failures_alone_runs_nothing() -> None:
    bad = request([VOCAB_SIZE], request_id="bad")
    output = toy_runner().execute_model(SchedulerOutput(4, [bad], [planned("bad", 0, 1)], []))
    assert (output.step_id, list(output.failed), output.forward_s) == (4, ["bad"], 0.0)


@folded(
    ("plan", "message"),
    [
        (SchedulerOutput(0, [], [planned("x", 1, 1)], []), "x has no row"),
        (SchedulerOutput(0, [], [planned("x", 1, 2, [5])], []), "x has no row"),
        (SchedulerOutput(0, [request([1], block_ids=[NUM_BLOCKS])], [planned("r", 0, 1)], []), "block ids"),
        (SchedulerOutput(0, [request([1], block_ids=[3])], [planned("r", 0, 2)], []), "differ from the plan"),
        (SchedulerOutput(0, [request([1], block_ids=[3])], [planned("r", 0, 2, [99])], []), "23 tokens"),
        (
            SchedulerOutput(0, [request([1], block_ids=[3])], [planned("r", 0, 1)], [], max_decode_steps=5),
            "no KV cache blocks",
        ),
        (
            SchedulerOutput(0, [], [], ["x"], version=3),
            f"version 3; this worker expects {STEP_PROTOCOL_VERSION}",
        ),
    ],
)
def test_contradictory_plan_is_an_engine_error(plan: SchedulerOutput, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        toy_runner().execute_model(plan)


def test_row_is_reused_in_the_step_that_frees_it() -> None:
    driver = Driver(toy_runner(max_num_seqs=1))
    driver.submit("a", prompt(5, 1), params(2))
    driver.generate("a", 2)
    driver.finish("a")
    driver.submit("b", prompt(6, 2), params(2))
    assert driver.generate("b", NUM_OUTPUT).token_ids == alone(6, 2, 2).token_ids


def test_timings_are_reported() -> None:
    driver = Driver(toy_runner())
    driver.submit("a", prompt(5, 1), params(0))
    output = driver.step({"a": 5})
    assert output.forward_s > 0
    assert output.sample_s > 0


@pytest.mark.parametrize(
    ("kind", "length", "wanted"),
    [(1, 13, [12]), (1, 3, None), (0, 13, None)],
    ids=["a long prompt", "a short one", "one whose logprobs are told"],
)
def test_model_receives_the_rows_read_of_a_long_step(
    kind: int, length: int, wanted: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, heard = toy_runner(), []
    forward = runner._pipeline.forward

    def listening(inputs: Any) -> Any:
        heard.append(inputs.step.wanted)
        return forward(inputs)

    monkeypatch.setattr(runner._pipeline, "forward", listening)
    driver = Driver(runner)
    driver.submit("a", prompt(length, 1), params(kind))
    driver.generate("a", 2)
    assert (None if heard[0] is None else heard[0].tolist()) == wanted
    assert heard[1] is None, "a token by itself is read"
