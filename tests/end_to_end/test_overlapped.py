# SPDX-License-Identifier: Apache-2.0
"""The overlapped loop against the plain one on real models: all outputs equal bit for bit, whatever races.

A pool of few blocks, chunked prompts, shared prefixes and late arrivals make the two loops plan differently; stops,
stop strings and aborts come in while further steps of the same requests are in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.outputs import RequestOutput
from quire.sampling_extras import DryBreaker
from quire.sampling_params import SamplingParams, StructuredOutputsParams, ThinkingMarkers
from tests.fixtures.quick import quick
from tests.fixtures.thread_ranks import ThreadRanks
from tests.fixtures.tiny_models import VOCAB_SIZE

STEPS_IN_FLIGHT = (1, 2, 4)
STEM = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(40)]
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"n": 3, "logprobs": 0, "prompt_logprobs": 2},
    {"logit_bias": {5: 8.0, 7: -50.0}, "min_tokens": 4, "stop_token_ids": list(range(3, 60))},
    {"allowed_token_ids": list(range(60, 90)), "stop_token_ids": [61, 62, 63, 64]},
    {"stop": list("abcdefgh"), "include_stop_str_in_output": True},
    {"stop": list("stuvwxyz"), "temperature": 0.3, "logprobs": 1},
    {"max_tokens": 1},
    {"max_tokens": None},
    {
        "bad_words_token_ids": [[i] for i in range(3, 40)]
        + [[i, j] for i in range(40, 45) for j in range(45, 60)]
    },
    {
        "thinking_token_budget": 3,
        "thinking_markers": ThinkingMarkers((STEM[0],), (7, 8, 9)),
        "temperature": 0.5,
    },
    {
        "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
        "allowed_token_ids": [60, 61, 62, 63],
        "min_tokens": 5,
    },
    {"logprob_token_ids": [5, 6, 7], "flat_logprobs": True, "prompt_logprobs": 1, "stream_interval": 4},
    {"skip_reading_prefix_cache": True, "n": 2, "stream_interval": 3, "logprobs": 1},
    {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{2,9}(?: [0-9a-f]+)*!"), "logprobs": 1},
    {"structured_outputs": StructuredOutputsParams(choice=["one", "two", "twenty-two"]), "n": 2},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "logprobs": 1, "frequency_penalty": 0.4},
    {"mirostat": 1, "n": 2, "temperature": 0.7, "dry_multiplier": 0.5, "dry_penalty_last_n": -1},
    {
        "mirostat": 2, "mirostat_eta": 0.9,
        "structured_outputs": StructuredOutputsParams(regex=r"[a-z]{9,30}!"),
    },
    {
        "dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_breakers": (DryBreaker((60,)), DryBreaker((61,), (62,))),
        "allowed_token_ids": [60, 61, 62, 63, 64], "temperature": 0.2,
    },
    {"xtc_probability": 0.5, "xtc_threshold": 0.002, "top_k": 30, "repetition_penalty": 1.2, "repeat_last_n": 5},
    {"top_n_sigma": 1.5, "typical_p": 0.7, "dynatemp_range": 0.5, "temperature": 0.8, "min_p": 0.01},
)  # fmt: skip


class Job(NamedTuple):
    """A request, after how many tokens its caller has had enough, and its adapter."""

    prompt: list[int] | str
    params: SamplingParams
    abort_after: int | None = None
    adapter: LoRARequest | None = None


def serve(
    jobs: list[Job], one_by_one: bool = False, **args: Any
) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Run the jobs, a new one every other turn or when the one before has ended.

    Returns their last outputs, and the scheduler's statistics at the end.

    Unless more are asked for, a request gets one token at a time: whoever has had enough says so in time.
    """
    args = {"num_scheduler_steps": 1, **args}
    engine = LLMEngine(EngineConfig.from_args(cpu_threads=1, **args))
    last: dict[str, RequestOutput] = {}
    waiting, turn = list(enumerate(jobs)), 0
    while waiting or engine.has_unfinished_requests():
        if waiting and (not engine.has_unfinished_requests() if one_by_one else turn % 2 == 0):
            number, job = waiting.pop(0)
            engine.add_request(str(number), job.prompt, job.params, lora_request=job.adapter)
        turn += 1
        for output in engine.step():
            assert not (seen := last.get(output.request_id)) or not seen.finished, "an output after the last"
            last[output.request_id] = output
            enough = jobs[int(output.request_id)].abort_after
            if enough is not None and len(output.outputs[0].token_ids) >= enough:
                engine.abort_request(output.request_id)
    engine.call_core("check_integrity")
    stats = engine.call_core("stats")
    engine.shutdown()
    return [last[str(number)] for number in range(len(jobs))], stats


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller sees, times and cache hits apart."""
    return [
        (o.outputs, o.prompt_logprobs, o.metrics.num_generation_tokens, o.finished, o.prompt_token_ids)
        for o in outputs
    ]


def overlapped(steps: int) -> dict[str, Any]:
    return {"async_scheduling": True, "max_steps_in_flight": steps}


def jobs_of_all_kinds() -> list[Job]:
    draw = random.Random(2)
    jobs = []
    for number in range(2 * len(FEATURES)):
        prompt = STEM[: draw.randrange(41)] + [
            draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 20))
        ]
        params = SamplingParams(**({"max_tokens": 24, "seed": number} | FEATURES[number % len(FEATURES)]))
        abort_after = draw.choice([None, None, 1, 6])
        # How far the later completions are behind the first, when that one has had enough, is a matter of the loop.
        ends_by_itself = params.n > 1 or params.repetition_detection is not None
        jobs.append(Job(prompt, params, None if ends_by_itself else abort_after))
    return jobs


def test_all_parameters_with_aborts_and_preemption(
    tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    args = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96, "max_num_batched_tokens": 24}
    args |= {"max_num_seqs": 8, "num_gpu_blocks_override": 16}
    expected, _ = serve(jobs_of_all_kinds(), **args)
    reasons = {completion.finish_reason for output in expected for completion in output.outputs}
    assert reasons == {"stop", "length", "abort", "repetition"}
    for steps in STEPS_IN_FLIGHT:
        outputs, stats = serve(jobs_of_all_kinds(), **args, **overlapped(steps))
        assert facts(outputs) == facts(expected), f"{steps} steps in flight"
        assert stats["num_preemptions"] > 0
        assert stats["prefix_cache_hits"] > 0


@pytest.mark.parametrize("family", quick(["llama-tied-bias", "gemma3"], ["gemma3"]))
def test_multi_step_decode_keeps_results_of_all_parameters(
    family: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """Nobody aborts: when a caller has had enough depends on how many tokens come at once."""
    args = {"model": str(tiny_model(family)), "max_model_len": 96, "max_num_batched_tokens": 24}
    args |= {"max_num_seqs": 8, "num_gpu_blocks_override": 40, "swap_space": 0.001, "preemption_mode": "swap"}
    args |= {"max_multi_step_s": 1000.0}
    jobs = [job._replace(abort_after=None) for job in jobs_of_all_kinds()]
    expected, _ = serve(jobs, **args)
    for rounds in (3, 16):
        assert facts(serve(jobs, **args, num_scheduler_steps=rounds)[0]) == facts(expected), (
            f"{rounds} rounds"
        )
    alone, _ = serve(jobs, one_by_one=True, **args, num_scheduler_steps=16)
    assert facts(alone) == facts(expected)


@pytest.mark.more
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("speculation", [None, {"method": "ngram"}])
def test_stages_that_work_at_once_change_nothing(
    stages: int,
    speculation: dict[str, Any] | None,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    restore_threads: None,
) -> None:
    """Steps in flight are of different requests; aborts, stops and preemptions come while others are computed."""
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())
    args = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96, "max_num_batched_tokens": 24}
    args |= {"max_num_seqs": 8, "num_gpu_blocks_override": 16, "speculative_config": speculation}
    jobs = jobs_of_all_kinds()
    if (
        speculation is not None
    ):  # how many tokens come at once, when a caller has had enough, is then a matter of guesses
        jobs = [job._replace(abort_after=None) for job in jobs]
    expected, _ = serve(jobs, **args)
    outputs, stats = serve(jobs, **args, pipeline_parallel_size=stages)
    assert facts(outputs) == facts(expected)
    assert stats["num_preemptions"] > 0
    assert stats["prefix_cache_hits"] > 0


def test_stop_strings_cut_at_every_place(restore_threads: None) -> None:
    """The front end finds them, when the steps after the one that completes them are already in flight."""
    prompt = "What is a quire?"
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    (whole,), _ = serve([Job(prompt, params)], max_model_len=256)
    text = whole.outputs[0].text
    stops = [text[place : place + 3] for place in range(0, len(text) - 3, 2)]
    assert len(stops) > 10
    jobs = [Job(prompt, params.clone(stop=[stop])) for stop in stops]
    expected, _ = serve(jobs, max_model_len=256)
    for steps in STEPS_IN_FLIGHT:
        outputs, _ = serve(jobs, max_model_len=256, **overlapped(steps))
        assert facts(outputs) == facts(expected), f"{steps} steps in flight"
    for stop, output in zip(stops, expected, strict=True):
        assert output.outputs[0].stop_reason == stop
        assert output.outputs[0].text == text[: text.find(stop)]
