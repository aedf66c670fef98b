# SPDX-License-Identifier: Apache-2.0
"""Updates of cores in processes of their own: replicas, ranks, deaths, adapters and several API processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.client import ProcessClient
from quire.errors import ValidationError
from quire.sampling_params import RequestOutputKind
from tests.end_to_end.server import ADMIN, Server
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter
from tests.training.checkpoints import OPTIONS, changed, fresh, results, tensors_of

PARAMS = SamplingParams(
    max_tokens=10, temperature=0.0, logprobs=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
)
PROMPT = [3, 1, 4, 1, 5] * 6


@pytest.fixture(scope="module")
def second(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tiny_model("llama"), tmp_path_factory.mktemp("second") / "llama")


@asynccontextmanager
async def started(model: Path, **args: Any) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(EngineConfig.from_args(model=str(model), **{**OPTIONS, **args}))
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


async def said(engine: AsyncLLM, label: str, core: int | None = None) -> Any:
    prompt: Any = {"prompt_token_ids": PROMPT}
    outputs = [one async for one in engine.generate(prompt, PARAMS, label, data_parallel_rank=core)]
    return outputs[-1].outputs[0].token_ids, outputs[-1].outputs[0].logprobs


def pids(engine: AsyncLLM) -> list[int]:
    return [client.process.pid for client in engine._clients if isinstance(client, ProcessClient)]


async def until_new(engine: AsyncLLM, core: int, old: int) -> None:
    """Wait for the successor of a core."""
    async with asyncio.timeout(120):
        while pids(engine)[core] == old or engine._front_end.core_ready is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_core_that_dies_later_comes_back_with_new_weights(
    tiny_model: Callable[[str], Path], second: Path
) -> None:
    _, sums = fresh(second)
    async with started(tiny_model("llama")) as engine:
        before = await said(engine, "a")
        assert await engine.weights.load(str(second), "two") == "two"
        after = await said(engine, "b")
        assert after != before
        (old,) = pids(engine)
        os.kill(old, signal.SIGKILL)
        await until_new(engine, 0, old)
        assert await said(engine, "c") == after
        assert await engine.weights.checksums() == sums
        assert engine.weight_version == "two"


@pytest.mark.more
@pytest.mark.parametrize("moment", ["before", "between"])
async def test_core_killed_amid_an_update_is_old_or_new(
    tiny_model: Callable[[str], Path], second: Path, moment: str
) -> None:
    """A core that dies while it loads, or between loading and use, has the new weights once the update has ended."""
    async with started(tiny_model("llama")) as engine:
        (old,) = pids(engine)
        running = asyncio.create_task(said(engine, "a"))
        await engine.weights.begin()
        await engine.weights.update({"path": str(second)})
        if moment == "before":
            finishing = asyncio.create_task(engine.weights.finish("two"))
            await asyncio.sleep(0)
            os.kill(old, signal.SIGKILL)
        else:
            use_weights = engine._cores.use_weights

            def kill(model_dir: str) -> None:
                use_weights(model_dir)
                os.kill(old, signal.SIGKILL)

            engine._cores.use_weights = kill  # type: ignore[method-assign]
            finishing = asyncio.create_task(engine.weights.finish("two"))
        assert await finishing == "two"
        await running
        assert await engine.weights.checksums() == fresh(second)[1]
        async with started(second) as other:
            assert await said(engine, "b") == await said(other, "b")


@pytest.mark.more
async def test_replicas_update_as_one(
    tiny_model: Callable[[str], Path], second: Path, tmp_path: Path
) -> None:
    async with started(tiny_model("llama"), data_parallel_size=2) as engine:
        old = [await said(engine, f"a{core}", core) for core in range(2)]
        tensors = tensors_of(second)
        tensors.pop("model.norm.weight")
        bad = tmp_path / "bad"
        bad.mkdir()
        save_file(tensors, bad / "model.safetensors")
        with pytest.raises(ValidationError, match=r"model\.norm\.weight"):
            await engine.weights.load(str(bad))
        assert [await said(engine, f"b{core}", core) for core in range(2)] == old
        await engine.weights.load(str(second))
        first, other = [await said(engine, f"c{core}", core) for core in range(2)]
        assert first == other != old[0]
        assert await engine.weights.checksums() == fresh(second)[1]


@pytest.mark.more
async def test_two_ranks_keep_the_old_weights_if_one_cannot_load(
    tiny_model: Callable[[str], Path], second: Path, tmp_path: Path
) -> None:
    args = {"tensor_parallel_size": 2}
    expected, sums = fresh(second, **args)
    llm = LLM(str(tiny_model("llama")), **OPTIONS, **args)
    old = results(llm)
    tensors = tensors_of(second)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][-1, -1] = torch.nan  # of the last rank's shard
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValidationError, match="not finite"):
        llm.weights.load(str(tmp_path))
    assert results(llm) == old
    llm.weights.load(str(second))
    assert results(llm) == expected
    assert llm.weights.checksums() == sums
    llm.shutdown()


def test_adapters_stay_beside_new_weights(
    tiny_model: Callable[[str], Path], second: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    place = write_adapter(tmp_path / "adapter", linear_shapes(oracle_of(model)), rank=4, seed=3)
    adapter = LoRARequest("one", 1, str(place))
    args = {**OPTIONS, "enable_lora": True, "max_lora_rank": 8}
    other = LLM(str(second), **args)
    expected = results(other, lora_request=adapter), results(other)
    other.shutdown()
    llm = LLM(str(model), **args)
    old = results(llm, lora_request=adapter)
    llm.weights.load(str(second))
    assert (results(llm, lora_request=adapter), results(llm)) == expected
    llm.weights.load(str(model))
    assert results(llm, lora_request=adapter) == old
    llm.shutdown()


@pytest.mark.more
def test_api_processes_agree_on_version_and_pause(
    tiny_model: Callable[[str], Path], second: Path, tmp_path: Path
) -> None:
    args = ["--model", str(tiny_model("llama")), "--max-model-len", "128", "--api-server-count", "2"]
    server = Server(*args, log=tmp_path / "log")
    try:
        server.wait_ready()
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        before = asked(server, "POST", "/v1/completions", body).json()["choices"][0]["text"]
        assert asked(server, "POST", "/start_weight_update").status_code == 200
        for _ in range(4):  # each connection is another process's
            assert asked(server, "GET", "/is_paused").json() == {"is_paused": True}
            assert asked(server, "POST", "/start_weight_update").status_code == 409
        info = {"update_info": {"path": str(second)}}
        assert asked(server, "POST", "/update_weights", info).status_code == 200
        assert asked(server, "POST", "/finish_weight_update", {"weight_version": "v2"}).status_code == 200
        replies = [asked(server, "POST", "/v1/completions", body) for _ in range(4)]
        assert {reply.headers["x-weight-version"] for reply in replies} == {"v2"}
        (text,) = {reply.json()["choices"][0]["text"] for reply in replies}
        assert text != before
    finally:
        server.stop()


def asked(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    """Return the reply to a request on a connection of its own."""
    terms: dict[str, Any] = {"headers": ADMIN, "timeout": 120.0}
    return httpx.request(method, f"http://127.0.0.1:{server.port}{path}", json=body, **terms)
