# SPDX-License-Identifier: Apache-2.0
"""Simulated runs: nothing is lost, times are those of a plain clock, and results repeat."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.simulate.costs import work_of
from quire.simulate.load import LoadDescription, SimulatedRequest
from quire.simulate.report import summarize, table
from quire.simulate.simulator import Simulator
from tests.simulate.machines import COSTS, make_machine, make_simulator

LOADS = st.builds(
    SimulatedRequest,
    arrival_s=st.floats(0.0, 3.0),
    prompt_token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    num_output_tokens=st.integers(1, 20),
    tenant=st.sampled_from(["", "a", "b"]),
    priority=st.integers(0, 2),
)
OPTIONS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "num_scheduler_steps": st.integers(1, 5),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "enable_prefix_caching": st.booleans(),
        "num_gpu_blocks_override": st.sampled_from([18, 30, 65]),
        "async_scheduling": st.booleans(),
    }
)


@given(st.lists(LOADS, max_size=12), OPTIONS, st.integers(0, 3))
def test_every_request_gets_all_its_tokens(
    load: list[SimulatedRequest], options: dict[str, Any], concurrency: int
) -> None:
    load.sort(key=lambda request: request.arrival_s)
    options["max_steps_in_flight"] = 2 if options["async_scheduling"] else 1
    if options["async_scheduling"]:
        options["num_scheduler_steps"] = 1
    run = make_simulator(make_machine(**options), concurrency).run(load)
    assert not run.refused
    assert [one.num_output_tokens for one in run.requests] == [one.num_output_tokens for one in load]
    assert [one.num_prompt_tokens for one in run.requests] == [len(one.prompt_token_ids) for one in load]
    for one, request in zip(run.requests, load, strict=True):
        assert request.arrival_s <= one.arrival_s < one.first_s <= one.last_s
        assert one.first_s + sum(one.gaps_s) == pytest.approx(one.last_s)
        assert one.finish_reason == "length"
    times = [sample.now_s for sample in run.timeline]
    assert times == sorted(times)
    if concurrency:
        most = max((sample.num_running + sample.num_waiting for sample in run.timeline), default=0)
        assert most <= concurrency


def test_lone_requests_take_the_time_of_a_plain_clock() -> None:
    load = LoadDescription(8, 2.0, prompt_tokens="1-40", output_tokens="1-20").requests()
    run = make_simulator(make_machine(max_num_seqs=1, enable_prefix_caching=False)).run(load)
    now = 0.0
    for one, request in zip(run.requests, load, strict=True):
        now, computed = max(now, request.arrival_s), 0
        while computed < len(request.prompt_token_ids):
            count = min(len(request.prompt_token_ids) - computed, 16)
            is_last = computed + count == len(request.prompt_token_ids)
            now += COSTS.seconds(work_of([computed], [count], [int(is_last)], 1))
            computed += count
        assert one.first_s == pytest.approx(now)
        for place in range(1, request.num_output_tokens):
            now += COSTS.seconds(work_of([computed + place - 1], [1], [1], 1))
        assert one.last_s == pytest.approx(now)


def test_shared_prefix_is_found_in_the_cache() -> None:
    load = LoadDescription(10, 1.0, "4", "2", prefix_tokens=32).requests()
    cached = make_simulator(make_machine()).run(load)
    assert [one.num_cached_tokens for one in cached.requests] == [0] + 9 * [32]
    plain = make_simulator(make_machine(enable_prefix_caching=False)).run(load)
    assert not any(one.num_cached_tokens for one in plain.requests)
    assert summarize("", cached).ttft_ms.p50 < summarize("", plain).ttft_ms.p50


def test_request_that_can_never_run_is_refused_with_a_reason() -> None:
    load = [SimulatedRequest(0.0, [1] * 64, 4), SimulatedRequest(0.0, [1] * 8, 4)]
    run = make_simulator(make_machine()).run(load)
    assert len(run.requests) == 1
    assert run.refused[0].startswith("request 0: ")


def test_load_of_nothing_but_refused_requests_ends() -> None:
    run = make_simulator(make_machine(), 1).run([SimulatedRequest(0.0, [1] * 100, 4)] * 3)
    assert len(run.refused) == 3
    assert summarize("none", run).requests_per_s == 0.0


def test_plans_of_several_passes_keep_to_their_time() -> None:
    load = [SimulatedRequest(0.0, [1, 2, 3], 30)]
    machine = make_machine(num_scheduler_steps=16, max_multi_step_s=0.05)
    gaps = make_simulator(machine).run(load).requests[0].gaps_s
    assert max(gaps) <= 0.051
    assert len(gaps) < 15


def test_same_load_gives_the_same_run() -> None:
    description = LoadDescription(30, 10.0, "~20", "~8", prefix_tokens=8, prefix_groups=3, seed=7)
    runs = [make_simulator(make_machine()).run(description.requests()) for _ in range(2)]
    assert dataclasses.asdict(runs[0]) == dataclasses.asdict(runs[1])
    other = dataclasses.replace(description, seed=8)
    assert dataclasses.asdict(make_simulator(make_machine()).run(other.requests())) != dataclasses.asdict(
        runs[0]
    )


def test_table_has_a_row_for_each_run() -> None:
    run = make_simulator(make_machine()).run(
        LoadDescription(3, prompt_tokens="4", output_tokens="2").requests()
    )
    lines = table([summarize("a", run), summarize("longer name", run)])
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1


def test_burst_finds_an_idle_engine_that_begins_at_once() -> None:
    load = [SimulatedRequest(0.0, [number] * 6, 2) for number in range(2)]
    first, second = make_simulator(make_machine()).run(load).requests
    assert first.first_s == pytest.approx(COSTS.seconds(work_of([0], [6], [1], 1)))
    assert second.first_s == pytest.approx(first.first_s + COSTS.seconds(work_of([6, 0], [1, 6], [1, 1], 1)))


def test_mixed_steps_are_bounded_in_simulated_time() -> None:
    prompts = [SimulatedRequest(at, [number] * 50, 2) for number, at in enumerate((0.05, 0.2), 2)]
    load = [SimulatedRequest(0.0, [1] * 2, 40), *prompts]
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    second_longest = [
        sorted(make_simulator(make_machine(max_mixed_step_s=limit, **options)).run(load).requests[0].gaps_s)[
            -2
        ]
        for limit in (0.0, 0.01)
    ]
    assert (
        second_longest[0] > second_longest[1]
    )  # the first prompt's step is measured, so the second one's is bounded


def test_time_outside_the_core_is_in_first_tokens() -> None:
    load = LoadDescription(5, 2.0, prompt_tokens="1-40", output_tokens="1-20").requests()
    machine = make_machine()
    runs = [
        Simulator(machine.config, machine.cache, machine.costs, front_end_s=outside).run(load).requests
        for outside in (0.0, 0.25)
    ]
    for plain, later in zip(*runs, strict=True):
        assert later.first_s == pytest.approx(plain.first_s + 0.25)
        assert later.gaps_s == pytest.approx(plain.gaps_s)
