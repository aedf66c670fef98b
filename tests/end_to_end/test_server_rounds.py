# SPDX-License-Identifier: Apache-2.0
"""Servers that take several decode steps per plan: outputs are those of one step per plan, whatever comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.startup import MAX_ROUNDS
from quire.kernels import cpu
from quire.metrics.stats import IterationStats, StatLogger
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import SchedulerStats
from tests.end_to_end.test_overlapped import Job, jobs_of_all_kinds

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no kernels, no rounds")

PLAIN = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


class Recorder(StatLogger):
    """Keeps what is recorded of each step."""

    def __init__(self) -> None:
        self.steps: list[IterationStats] = []

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self.steps.append(iteration)


async def served(model: Path, **args: Any) -> AsyncLLM:
    """An engine of a server, in this process."""
    args = {"max_model_len": 96, "max_num_batched_tokens": 24, "max_num_seqs": 8, "cpu_threads": 1, **args}
    engine = AsyncLLM(EngineConfig.from_args(model=str(model), **args), in_process=True)
    await engine.wait_ready()
    return engine


async def outputs_of(engine: AsyncLLM, job: Job, name: str, delay_s: float) -> RequestOutput | None:
    """Return the client's output at the request's end, or None if the client has left before."""
    await asyncio.sleep(delay_s)
    joined: RequestOutput | None = None
    stream = engine.generate(job.prompt, job.params.clone(output_kind=RequestOutputKind.DELTA), name)
    async for output in stream:
        if joined is None:
            joined = replace(output)
        else:
            joined.add(output)
        if job.abort_after is not None and len(joined.outputs[0].token_ids) >= job.abort_after:
            await stream.aclose()
            return None
    return joined


async def all_outputs(engine: AsyncLLM, jobs: list[Job], seed: int) -> list[RequestOutput | None]:
    """Return the outputs of all jobs, which come at random moments."""
    rng = random.Random(seed)
    tasks = [outputs_of(engine, job, f"r{i}", rng.random() * 0.3) for i, job in enumerate(jobs)]
    outputs = await asyncio.gather(*tasks)
    await engine.call_core("check_integrity")
    assert engine.num_unfinished_requests() == 0
    return list(outputs)


def facts(output: RequestOutput) -> Any:
    """All that a client sees, times and cache hits apart."""
    assert output.metrics is not None
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    return completions, output.prompt_logprobs, output.metrics.num_generation_tokens


@pytest.mark.parametrize("options", [{}, {"max_multi_step_s": 1000.0}, {"num_gpu_blocks_override": 16}])
async def test_a_server_gives_the_same_outputs_with_rounds(
    options: dict[str, Any], tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """By the default bound on the time, without one, and where requests are preempted."""
    model, jobs = tiny_model("llama-tied-bias"), jobs_of_all_kinds()
    single = await served(model, num_scheduler_steps=1, **options)
    expected = await all_outputs(single, [job._replace(abort_after=None) for job in jobs], 0)
    await single.shutdown()
    engine = await served(model, **options)
    assert engine.config.scheduler.num_scheduler_steps == MAX_ROUNDS
    for seed in (1, 2):
        for job, output, alone in zip(jobs, await all_outputs(engine, jobs, seed), expected, strict=True):
            assert alone is not None
            if output is not None:
                assert facts(output) == facts(alone), job
    await engine.shutdown()


async def steps_of_one_request(model: Path, **args: Any) -> list[IterationStats]:
    """Return the statistics of the steps that generate 40 tokens."""
    engine = await served(model, max_multi_step_s=1000.0, **args)
    recorder = Recorder()
    engine.add_stat_logger(recorder)
    await outputs_of(engine, Job([1, 2, 3], PLAIN), "r", 0.0)
    await engine.shutdown()
    return [step for step in recorder.steps if step.num_generation_tokens]


async def test_a_burst_is_recorded_as_equal_gaps(
    tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    steps = await steps_of_one_request(tiny_model("llama"))
    sizes = [step.num_generation_tokens for step in steps]
    assert sizes == [1, MAX_ROUNDS, MAX_ROUNDS, 40 - 1 - 2 * MAX_ROUNDS]
    assert [len(step.inter_token_s) for step in steps] == [0, *sizes[1:]]
    for step in steps[1:]:
        assert len(set(step.inter_token_s)) == 1
        assert step.inter_token_s[0] > 0


@pytest.mark.parametrize("options", [{"num_scheduler_steps": 1}, {"multi_step_streams": False}])
async def test_streams_of_one_token_per_step_can_be_requested(
    options: dict[str, Any], tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    steps = await steps_of_one_request(tiny_model("llama"), **options)
    assert [step.num_generation_tokens for step in steps] == [1] * 40


async def test_a_stop_string_within_a_burst_cuts_it(
    tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    engine = await served(tiny_model("llama"), max_multi_step_s=1000.0)
    whole = await outputs_of(engine, Job([1, 2, 3], PLAIN), "whole", 0.0)
    assert whole is not None
    text = whole.outputs[0].text
    stop = text[len(text) // 4 :][:3]
    cut = await outputs_of(engine, Job([1, 2, 3], PLAIN.clone(stop=[stop])), "cut", 0.0)
    assert cut is not None
    assert cut.outputs[0].text == text[: text.index(stop)]
    count = len(cut.outputs[0].token_ids)
    assert count < 40
    assert list(cut.outputs[0].token_ids) == list(whole.outputs[0].token_ids)[:count]
    assert cut.metrics is not None
    assert cut.metrics.num_generation_tokens == count
    await engine.call_core("check_integrity")
    await engine.shutdown()
