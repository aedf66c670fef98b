# SPDX-License-Identifier: Apache-2.0
"""Measurement of a machine's step costs: an engine like a server's runs prompts of many lengths, some at once."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.trace import read_trace
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
MAX_S = 60.0  # No further round begins after so long; slow models are measured with shorter prompts.
SEED = 0


class Round(NamedTuple):
    """Prompts of a round, and whether each is sent once the one before has its first token, or all at once."""

    prompts: list[list[int]]
    is_staggered: bool


def calibrate(config: EngineConfig) -> Machine:
    """Start an engine, measure its steps, and return the machine.

    Raises:
        ConfigError: such an engine is not simulated.
        StartupError: the engine cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="quire-calibrate-") as directory:
        file = Path(directory, "run.trace")
        recording = dataclasses.replace(config.observability, record_trace=str(file))
        asyncio.run(_run(dataclasses.replace(config, observability=recording)))
        return machine_of(read_trace(file))


async def _run(config: EngineConfig) -> None:
    engine = AsyncLLM(config)
    try:
        await engine.wait_ready()
        check_simulated(engine.config)
        rounds = list(_rounds(engine.config))
        progress = Progress(len(rounds), "Measured", "rounds")
        started = time.monotonic()
        for number, one in enumerate(rounds):
            if time.monotonic() - started > MAX_S:
                break
            await _run_round(engine, number, one)
            progress.update()
        progress.close()
    finally:
        await engine.shutdown()


async def _run_round(engine: AsyncLLM, number: int, one: Round) -> None:
    """Run the requests of a round to their ends."""
    tasks = []
    for place, token_ids in enumerate(one.prompts):
        generates = asyncio.Event()
        tasks.append(asyncio.create_task(_answer(engine, f"{number}-{place}", token_ids, generates)))
        if one.is_staggered:
            await generates.wait()
    await asyncio.gather(*tasks)


def _rounds(config: EngineConfig) -> Iterator[Round]:
    """Yield the rounds; no two prompts are alike, so that no prefix is found in the cache."""
    generator, vocabulary = random.Random(SEED), range(config.arch.vocab_size)
    room = max(config.model.max_model_len - OUTPUT_TOKENS, 1)
    for batch in BATCHES:
        if batch <= config.scheduler.max_num_seqs:
            lengths = [min(length, room) for length, _ in zip(itertools.cycle(SHORT_PROMPTS), range(batch))]
            yield Round([generator.choices(vocabulary, k=length) for length in lengths], is_staggered=False)
    for length in LONG_PROMPTS:
        if length <= room:
            prompts = [generator.choices(vocabulary, k=length) for _ in range(LONG_REQUESTS)]
            yield Round(prompts, is_staggered=True)


async def _answer(engine: AsyncLLM, name: str, token_ids: list[int], generates: asyncio.Event) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    try:
        async for _ in engine.generate(TokensPrompt(prompt_token_ids=token_ids), params, name):
            generates.set()
    finally:
        generates.set()
