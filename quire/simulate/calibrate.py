# SPDX-License-Identifier: Apache-2.0
"""Measurement of a machine's step costs: an engine like a server's runs prompts of many lengths, some at once."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.trace import Added, Planned, Returned, Trace, read_trace
from quire.inputs import TokensPrompt
from quire.progress import Progress
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.simulate.machine import Machine, check_simulated, machine_of

BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Requests of each of the first rounds, as far as the engine takes so many: decode steps of all sizes."""
SHORT_PROMPTS = (16, 40)  # Tokens, in turn.
LONG_PROMPTS = (200, 500, 1000, 2000, 4000)
"""Tokens of each of the later rounds, as far as the context has room."""
LONG_REQUESTS = 3  # Of such a round; each is sent when the one before generates.
OUTPUT_TOKENS = 48
LEAST_S = 6.0  # All rounds are repeated until so much time has passed.
MAX_S = 60.0  # No further round begins after so long; slow models are measured with shorter prompts.
SEED = 0


class Round(NamedTuple):
    """Prompts of a round, and whether each is sent once the one before has its first token, or all at once."""

    prompts: list[list[int]]
    is_staggered: bool


class Answer(NamedTuple):
    """Times of a request at its client; `is_alone`: no other one was in flight until its first token."""

    name: str
    sent_s: float
    first_s: float
    is_alone: bool


def calibrate(config: EngineConfig) -> Machine:
    """Start an engine, measure its steps, and return the machine.

    Raises:
        ConfigError: such an engine is not simulated.
        StartupError: the engine cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-calibrate-") as directory:
        file = Path(directory, "run.trace")
        recording = dataclasses.replace(config.observability, record_trace=str(file))
        answers = asyncio.run(_run(dataclasses.replace(config, observability=recording)))
        trace = trace_from(read_trace(file), answers[0].sent_s)
    return msgspec.structs.replace(machine_of(trace), front_end_s=front_end_s(trace, answers))


def trace_from(trace: Trace, began: float) -> Trace:
    """Return a run from its first request after a time on; no other one may be in flight then."""
    starts = (place for place, one in enumerate(trace.frames) if isinstance(one, Added) and one.now >= began)
    return msgspec.structs.replace(trace, frames=trace.frames[next(starts) :])


def front_end_s(trace: Trace, answers: Sequence[Answer]) -> float:
    """Return the median time to the first token that lone requests do not spend in the core."""
    added: dict[str, float] = {}
    returned: dict[str, float] = {}
    plans: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    for frame in trace.frames:
        if isinstance(frame, Added):
            # The front end has appended a number to the client's name.
            names[frame.number] = frame.request.request_id.rpartition("-")[0]
            added[names[frame.number]] = frame.now
        elif isinstance(frame, Planned):
            plans[frame.step_id] = [names[number] for number in frame.numbers]
        elif isinstance(frame, Returned):
            for name, tokens in zip(plans.pop(frame.step_id), frame.sampled, strict=True):
                if tokens:
                    returned.setdefault(name, frame.now)
    outside = (
        one.first_s - one.sent_s - (returned[one.name] - added[one.name]) for one in answers if one.is_alone
    )
    return max(statistics.median(outside), 0.0)


async def _run(config: EngineConfig) -> list[Answer]:
    """Run the rounds, again and again if that takes little time, and return the answers that count."""
    engine = AsyncLLM(config)
    try:
        await engine.wait_ready()
        check_simulated(engine.config)
        generator, began = random.Random(SEED), time.monotonic()
        answers = await _run_rounds(engine, generator, "first", began + MAX_S)
        if time.monotonic() < began + LEAST_S:
            answers = []  # Memory that no step has touched takes longer once, which is much of so short a time.
        while not answers or time.monotonic() < began + LEAST_S:
            answers += await _run_rounds(engine, generator, f"{len(answers)}", began + MAX_S)
        return answers
    finally:
        await engine.shutdown()


async def _run_rounds(engine: AsyncLLM, generator: random.Random, name: str, ends_at: float) -> list[Answer]:
    rounds = list(_rounds(engine.config, generator))
    progress, answers = Progress(len(rounds), "Measured", "rounds"), []
    for number, one in enumerate(rounds):
        if time.monotonic() > ends_at:
            break
        answers += await _run_round(engine, f"{name}-{number}", one)
        progress.update()
    progress.close()
    return answers


async def _run_round(engine: AsyncLLM, name: str, one: Round) -> list[Answer]:
    """Run the requests of a round to their ends."""
    tasks = []
    for place, token_ids in enumerate(one.prompts):
        generates = asyncio.Event()
        is_alone = place == 0 and (one.is_staggered or len(one.prompts) == 1)
        answer = _answer(engine, f"{name}-{place}", token_ids, generates, is_alone)
        tasks.append(asyncio.create_task(answer))
        if one.is_staggered:
            await generates.wait()
    return await asyncio.gather(*tasks)


def _rounds(config: EngineConfig, generator: random.Random) -> Iterator[Round]:
    """Yield the rounds; no two prompts are alike, so that no prefix is found in the cache."""
    vocabulary = range(config.arch.vocab_size)
    room = max(config.model.max_model_len - OUTPUT_TOKENS, 1)
    for batch in BATCHES:
        if batch <= config.scheduler.max_num_seqs:
            lengths = [min(length, room) for length, _ in zip(itertools.cycle(SHORT_PROMPTS), range(batch))]
            yield Round([generator.choices(vocabulary, k=length) for length in lengths], is_staggered=False)
    for length in LONG_PROMPTS:
        if length <= room:
            prompts = [generator.choices(vocabulary, k=length) for _ in range(LONG_REQUESTS)]
            yield Round(prompts, is_staggered=True)


async def _answer(
    engine: AsyncLLM, name: str, token_ids: list[int], generates: asyncio.Event, is_alone: bool
) -> Answer:
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    sent_s, first_s = time.monotonic(), 0.0
    try:
        async for _ in engine.generate(TokensPrompt(prompt_token_ids=token_ids), params, name):
            first_s = first_s or time.monotonic()
            generates.set()
    finally:
        generates.set()
    return Answer(name, sent_s, first_s, is_alone)
