# SPDX-License-Identifier: Apache-2.0
"""Probes while a server loads: the stage, and what is left of it."""

from __future__ import annotations

import pytest

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_progress import STAGES, LoadingState
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for


@pytest.mark.parametrize(
    ("state", "words", "retry_after"),
    [
        (LoadingState("weights", 10**9, 4 * 10**9, 2.0), "weights, 1.00 of 4.00 GB, about 6 s left", "6"),
        (LoadingState("weights", 1, 10**12, 9.0), "weights", "60"),
        (LoadingState("warm_up", 0, 0, 3.0), "warm_up", "1"),
        (None, "loading", "1"),
    ],
)
async def test_probes_report_the_loading_stage(
    state: LoadingState | None, words: str, retry_after: str
) -> None:
    engine = FakeEngine()
    engine.is_ready, engine.loading = False, state
    async with client_for(engine) as client:
        for path in ("/health", "/readyz"):
            response = await client.get(path)
            assert (response.status_code, response.headers["retry-after"]) == (503, retry_after)
            assert words in response.json()["error"]["message"]
        assert (await client.get("/livez")).status_code == 200


async def test_core_process_reports_its_stages() -> None:
    args = {"max_model_len": 64, "kv_cache_memory_bytes": 2**23, "cpu_threads": 1}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args))
    assert engine.loading.stage in STAGES
    await engine.wait_ready()
    assert engine.is_ready
    await engine.shutdown()
    assert engine.loading is None
