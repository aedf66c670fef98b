# SPDX-License-Identifier: Apache-2.0
"""The app in front of a real engine, whose null executor makes numbers by the pooling description."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import EngineConfig, ServerConfig
from quire.config.pooling import PoolingSpec
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from tests.entrypoints.openai.conftest import _no_key_from_environment as _no_key_from_environment
from tests.entrypoints.openai.serving import CheckedClient
from tests.fixtures.pooling import Pools

Serve = Callable[..., contextlib.AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def serve(pools: Pools, pair_model_dir: Path) -> Serve:
    """A client of a server whose model is described so; keywords are of the server, and `engine_args` of its engine."""

    @contextlib.asynccontextmanager
    async def served(
        spec: PoolingSpec, engine_args: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[httpx.AsyncClient]:
        pools(spec)
        config = EngineConfig.from_args(
            model=str(pair_model_dir),
            distributed_executor_backend="null",
            num_gpu_blocks_override=65,
            served_model_name=("pooler",),
            **(engine_args or {}),
        )
        engine = AsyncLLM(config, in_process=True)
        await engine.wait_ready()
        async with CheckedClient(build_app(engine, ServerConfig(**options))) as client:
            client.engine = engine  # type: ignore[attr-defined]
            yield client
        await engine.shutdown()

    return served
