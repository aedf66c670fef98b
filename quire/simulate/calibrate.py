# SPDX-License-Identifier: Apache-2.0
"""Measurement of a machine's step costs: an engine like a server's runs prompts of many lengths, some at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.trace import read_trace
from quire.inputs import TokensPrompt
from quire.progress import Progress
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.simulate.machine import Machine, check_simulated, machine_of

BATCHES = (1, 1, 2, 4, 8, 16, 32, 64)  # Requests of each round, as far as the engine takes so many.
PROMPT_TOKENS = (16, 64, 200, 500, 1000, 2000, 4000)  # Lengths in turn, as far as the context has room.
OUTPUT_TOKENS = 48
MAX_S = 60.0  # No further round begins after so long; slow models are measured with fewer requests at a time.
SEED = 0


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
        for number, prompts in enumerate(rounds):
            if time.monotonic() - started > MAX_S:
                break
            await asyncio.gather(*(_answer(engine, f"{number}-{i}", ids) for i, ids in enumerate(prompts)))
            progress.update()
        progress.close()
    finally:
        await engine.shutdown()


def _rounds(config: EngineConfig) -> Iterator[list[list[int]]]:
    """Yield the prompts of each round, no two alike, so that no prefix is found in the cache."""
    generator = random.Random(SEED)
    room = config.model.max_model_len - OUTPUT_TOKENS
    lengths = [length for length in PROMPT_TOKENS if length <= room] or [max(room // 2, 1)]
    place = 0
    for batch in BATCHES:
        if batch > config.scheduler.max_num_seqs:
            return
        prompts = []
        for _ in range(batch):
            prompts.append(generator.choices(range(config.arch.vocab_size), k=lengths[place % len(lengths)]))
            place += 1
        yield prompts


async def _answer(engine: AsyncLLM, name: str, token_ids: list[int]) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async for _ in engine.generate(TokensPrompt(prompt_token_ids=token_ids), params, name):
        pass
