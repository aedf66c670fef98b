# SPDX-License-Identifier: Apache-2.0
"""Replicas of one server share a directory: each writes to a part of its own, and all read all of it."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.kv_store.disk.maintenance import list_namespaces
from quire.kv_store.disk.namespaces import Manifest
from quire.kv_store.disk.shared import SharedDiskStore
from quire.kv_store.row_store import Namespace
from quire.outputs import RequestOutput

OPTIONS: dict[str, Any] = {
    "max_model_len": 96, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4, "data_parallel_size": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
PROMPTS = [[start + place * start % 40 for place in range(40)] for start in (5, 7)]
WITHIN_S = 300.0


async def started(model: Path, store: Path) -> AsyncLLM:
    engine = AsyncLLM(EngineConfig.from_args(model=str(model), kv_store=str(store), **OPTIONS))
    await engine.wait_ready()
    return engine


async def ask(engine: AsyncLLM, prompt: list[int], replica: int) -> RequestOutput:
    """Return the last output; it has everything that was generated."""
    outputs = []
    stream = engine.generate(
        {"prompt_token_ids": prompt}, PARAMS, f"of {replica}", data_parallel_rank=replica
    )
    async for output in stream:
        outputs.append(output)
    return outputs[-1]


def answer_of(output: RequestOutput) -> Any:
    (one,) = output.outputs
    return one.token_ids, [
        place[token].logprob for token, place in zip(one.token_ids, one.logprobs or [], strict=True)
    ]


async def ask_until_stored(engine: AsyncLLM, prompt: list[int], replica: int) -> RequestOutput:
    """Ask until blocks come from the directory: a wait for a slow disk is bounded, and a reader sees rows later."""
    for _ in itertools.count():
        output = await ask(engine, prompt, replica)
        if output.num_stored_tokens:
            return output
        assert await engine.reset_prefix_cache()
        await asyncio.sleep(0.2)
    raise AssertionError("not reached")


def num_rows(store: Path) -> int:
    """Return the rows of the only namespace, which no process writes to any more."""
    path = next(store.glob("*/namespace.json"))
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    assert not any(state.is_in_use for state in list_namespaces(store)), "a replica has left its lock"
    rows = SharedDiskStore(store, Namespace(manifest.values, manifest.row_bytes), 1 << 30)
    count = len(rows.names())
    rows.close()
    return count


@pytest.mark.more
def test_replicas_share_one_directory(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Each prompt is computed by one replica; after that both have it, and so has the next server."""
    model, store = tiny_model("llama-tied-bias"), tmp_path / "rows"

    async def check() -> None:
        engine = await started(model, store)
        computed = [[await ask(engine, prompt, replica) for replica in (0, 1)] for prompt in PROMPTS]
        assert [len({str(answer_of(output)) for output in outputs}) for outputs in computed] == [1, 1]
        assert await engine.reset_prefix_cache(), "which saves what is to be saved"
        again = [
            [await ask_until_stored(engine, prompt, replica) for replica in (0, 1)] for prompt in PROMPTS
        ]
        engine.shutdown()
        later = await started(model, store)
        restarted = [
            [await ask_until_stored(later, prompt, replica) for replica in (0, 1)] for prompt in PROMPTS
        ]
        later.shutdown()
        for known, *others in zip(computed, again, restarted, strict=True):
            for output in itertools.chain(*others):
                assert answer_of(output) == answer_of(known[0])

    asyncio.run(asyncio.wait_for(check(), WITHIN_S))
    assert num_rows(store) > 0
    shutil.rmtree(store)
