# SPDX-License-Identifier: Apache-2.0
"""Requests of trainers' clients, as vLLM's, SGLang's and TRL's servers get them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.training.trainer import WeightServer, remove_segment, write_segment
from tests.entrypoints.openai.serving import client_for
from tests.training.checkpoints import changed, fresh, tensors_of
from tests.training.extensions import Counting

ADMIN = {"authorization": "Bearer admin"}
PLACE = f"{Counting.__module__}:{Counting.__name__}"
BODY: dict[str, Any] = {
    "prompt": [3, 1, 4, 1, 5] * 8,
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": 2,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def second(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tiny_model("llama"), tmp_path_factory.mktemp("second") / "llama")


@pytest.fixture
async def trainer(request: pytest.FixtureRequest) -> AsyncIterator[WeightServer]:
    server = WeightServer()
    yield server
    server.close()


@pytest.fixture
async def engine(tiny_model: Callable[[str], Path], trainer: WeightServer) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig.from_args(
        model=str(tiny_model("llama")),
        max_model_len=128,
        cpu_threads=1,
        enable_packed_weights_cache=False,
        worker_extension_cls=PLACE,
        weight_transfer_addresses=[trainer.address],
        weight_update_timeout=60.0,
    )
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    yield engine
    await engine.shutdown()


@pytest.fixture
async def client(engine: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine, admin_api_key="admin") as found:  # type: ignore[arg-type]
        found.headers.update(ADMIN)
        yield found


async def completion(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["token_ids"], choice["logprobs"]


async def posted(client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
    response = await client.post(path, **({} if body is None else {"json": body}))
    assert response.status_code == 200, (path, response.text)
    return response.json()


async def refused(client: httpx.AsyncClient, path: str, body: Any, status: int, words: str) -> None:
    response = await client.post(path, **({} if body is None else {"json": body}))
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


async def test_vllm_bracket_by_segment_changes_version_and_bits(
    client: httpx.AsyncClient, second: Path
) -> None:
    _, sums = fresh(second)
    before = await completion(client)
    assert (await posted(client, "/pause?mode=keep&clear_cache=true")) == {"status": "paused"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}
    update_id = (await posted(client, "/start_weight_update"))["update_id"]
    name = f"quire-routes-{os.getpid()}"
    info = write_segment(name, tensors_of(second))
    await posted(client, "/update_weights", {"update_info": [info], "update_id": update_id})
    remove_segment(name)
    assert (await client.get("/weight_info")).json() == {"weight_version": "default"}
    reply = await posted(client, "/finish_weight_update", {"weight_version": "step-7"})
    assert reply == {"weight_version": "step-7"}
    assert (await client.get("/is_paused")).json() == {"is_paused": True}  # it was before
    await posted(client, "/resume")
    after = await completion(client)
    assert after != before
    checked = await posted(client, "/weight_checker", {"action": "checksum"})
    assert checked["checksums"] == sums
    body = {"action": "compare", "baseline": {**sums, next(iter(sums)): "0" * 64}}
    compared = await posted(client, "/weights_checker", body)
    assert (compared["match"], compared["mismatches"]) == (False, [next(iter(sums))])
    response = await client.get("/v1/models")
    assert response.headers["x-weight-version"] == "step-7"
    assert (await posted(client, "/update_weight_version", {"new_version": "b"})) == {"weight_version": "b"}


async def test_paused_server_queues_or_refuses_new_requests(client: httpx.AsyncClient) -> None:
    expected = await completion(client)
    await posted(client, "/pause?mode=keep")
    waiting = asyncio.create_task(completion(client))
    while not (await client.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not waiting.done()
    await posted(client, "/resume")
    assert await waiting == expected
    for mode in ("abort", "wait"):
        await posted(client, f"/pause?mode={mode}")
        assert (await client.post("/v1/completions", json=BODY)).status_code == 503
        await posted(client, "/resume")
    await refused(client, "/pause?mode=halt", None, 400, "mode must be one of")
    await refused(client, "/pause?clear_cache=perhaps", None, 400, "true or false")
    await refused(client, "/pause?modus=keep", None, 400, "no option")
    assert await completion(client) == expected


async def test_update_while_requests_run_ends_every_request(client: httpx.AsyncClient, second: Path) -> None:
    tasks = [asyncio.create_task(completion(client, max_tokens=60, seed=n)) for n in range(6)]
    while not (await client.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    reply = await posted(
        client, "/update_weights_from_disk", {"model_path": str(second), "weight_version": "2"}
    )
    assert reply == {"success": True, "message": "weights 2 are in use", "num_paused_requests": 0}
    for tokens, _ in await asyncio.gather(*tasks):
        assert len(tokens) == 60


async def test_requests_of_a_mixed_update_end_and_are_not_cached(
    client: httpx.AsyncClient, second: Path
) -> None:
    """By vLLM's routes and by SGLang's; afterwards a prompt has the tokens of a fresh engine."""
    expected = {}
    for number in range(3):
        tasks = [asyncio.create_task(completion(client, max_tokens=60, seed=n)) for n in range(2)]
        while not (await client.get("/v1/requests")).json()["data"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if number == 1:
            await posted(client, "/start_weight_update", {"mode": "mixed"})
            await posted(client, "/update_weights", {"update_info": {"path": str(second)}})
            await posted(client, "/finish_weight_update")
        else:
            body = {"model_path": str(second), "flush_cache": number == 0}
            await posted(client, "/update_weights_from_disk", body)
        for tokens, _ in await asyncio.gather(*tasks):
            assert len(tokens) == 60
        expected[number] = await completion(client)
    assert expected[0] == expected[1] == expected[2]
    await refused(client, "/start_weight_update", {"mode": "mix"}, 400, "mode")


async def test_sglang_routes_answer_or_name_the_alternative(client: httpx.AsyncClient) -> None:
    expected = await completion(client)
    for mode in ("abort", "retract", "in_place"):
        assert (await posted(client, "/pause_generation", {"mode": mode}))["success"] is True
        await posted(client, "/continue_generation", {})
    await posted(client, "/release_memory_occupation", {"tags": None})
    await posted(client, "/resume_memory_occupation", {"tags": ["weights"]})
    await posted(client, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    await posted(client, "/flush_cache")
    for path in (
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/init_weights_update_group",
    ):
        await refused(client, path, {}, 400, "docs/training.md")
    await refused(client, "/update_weights_from_disk", {"model_path": "/no/such"}, 400, "does not exist")
    assert await completion(client) == expected


async def test_trl_sequence_over_tcp_updates_with_the_reset(
    client: httpx.AsyncClient, second: Path, trainer: WeightServer
) -> None:
    before, tensors = await completion(client), tensors_of(second)
    host, port = trainer.address.split(":")
    assert (await client.get("/get_world_size/")).json() == {"world_size": 1}
    body = {"host": host, "port": int(port), "world_size": 2, "client_device_uuid": "x"}
    await refused(client, "/init_communicator/", body, 400, "NCCL")

    def serve() -> None:
        trainer.accept()
        for name, tensor in tensors.items():
            trainer.send({name: tensor})

    thread = threading.Thread(target=serve)
    thread.start()
    await posted(client, "/init_communicator/", {**body, "backend": "tcp"})
    for name, tensor in tensors.items():
        one = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        assert (await posted(client, "/update_named_param/", one)) == {"message": "received"}
    thread.join()
    await posted(client, "/reset_prefix_cache/")
    await posted(client, "/close_communicator/")
    assert await completion(client) != before
    await posted(client, "/reset_prefix_cache/")
    assert (await posted(client, "/weight_checker", {"action": "checksum"}))["checksums"] == fresh(second)[1]


async def test_tcp_goes_only_to_addresses_of_the_operator(client: httpx.AsyncClient) -> None:
    for address, words in (
        ("127.0.0.1:1", "not allowed"),
        ("nowhere", "host:port"),
        ("h:99999", "host:port"),
    ):
        body = {"init_info": {"backend": "tcp", "address": address}}
        await refused(client, "/init_weight_transfer_engine", body, 400, words)
    nccl = {"master_address": "10.0.0.1", "master_port": 5, "rank_offset": 1, "world_size": 2}
    await refused(client, "/init_weight_transfer_engine", {"init_info": nccl}, 400, "NCCL")
    await refused(client, "/init_weight_transfer_engine", {"init_info": {"backend": "ipc"}}, 400, "ipc")
    await posted(client, "/shutdown_weight_transfer_engine")


async def test_brackets_out_of_order_are_conflicts(client: httpx.AsyncClient) -> None:
    for path in ("/finish_weight_update", "/abort_weight_update"):
        await refused(client, path, None, 409, "no weight update is open")
    await refused(client, "/update_weights", {"update_info": {"path": "/tmp"}}, 409, "no weight update")
    await posted(client, "/start_weight_update", {"mode": "wait"})
    await refused(client, "/start_weight_update", {}, 409, "open")
    await refused(client, "/finish_weight_update", {"weight_version": "x\ny"}, 400, "printable")
    await posted(client, "/abort_weight_update")
    await refused(client, "/start_draft_weight_update", {}, 400, "draft")
    await refused(client, "/weight_checker", {"action": "reset"}, 400, "reset")
    await completion(client)
    text = (await client.get("/metrics")).text
    found = {
        tuple(sample.labels.values())[-1]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "quire:weight_updates"
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    assert found["aborted"] == 1
    assert found["finished"] == 0


async def test_silent_updater_is_given_up(tiny_model: Callable[[str], Path]) -> None:
    args = {"max_model_len": 64, "distributed_executor_backend": "null", "weight_update_timeout": 0.05}
    engine = AsyncLLM(EngineConfig.from_args(model=str(tiny_model("llama")), **args), in_process=True)
    await engine.wait_ready()
    await engine.weights.begin()
    async with asyncio.timeout(300):
        while engine.is_sleeping:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not engine.weights.is_open
    await engine.shutdown()


async def test_extension_methods_run_on_each_worker(client: httpx.AsyncClient) -> None:
    async def call(method: str, *args: Any, **kwargs: Any) -> Any:
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        return (await posted(client, "/collective_rpc", body))["results"]

    (count,) = await call("num_parameters")
    assert int(count) > 1000
    assert await call("num_parameters", times=2) == [str(2 * int(count))]
    assert await call("ranks") == [{"rank": 0, "is_same": True}]
    assert await call("remember", "a", "b") == [None]
    assert await call("recall") == [[{"a": "b"}]]
    for method, words in (("_hidden", "not one of"), ("fail", "no such thing"), ("__init__", "not one of")):
        await refused(client, "/collective_rpc", {"method": method}, 400, words)
    await refused(client, "/collective_rpc", {"method": "recall", "args": [1]}, 400, "TypeError")
    await completion(client)


async def test_training_routes_need_the_admin_key(client: httpx.AsyncClient, engine: AsyncLLM) -> None:
    client.headers.pop("authorization")
    for path in (
        "/pause",
        "/start_weight_update",
        "/collective_rpc",
        "/update_weights_from_disk",
        "/flush_cache",
    ):
        assert (await client.post(path, json={})).status_code == 401
    async with client_for(engine) as keyless:  # type: ignore[arg-type]
        response = await keyless.post("/pause")
        assert response.status_code == 404
        assert "x-weight-version" not in response.headers
