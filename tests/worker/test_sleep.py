# SPDX-License-Identifier: Apache-2.0
"""A worker that sleeps gives its memory back, and wakes with the same weights, on the host and on a GPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.client import ProcessClient
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineError
from quire.executor import uniproc
from quire.models.loader import load_model
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.sleep.parked_weights import ParkedWeights
from quire.worker import step_worker
from quire.worker import worker as worker_module
from quire.worker.cpu import CpuDevice
from tests.models.harness import prepared_config
from tests.worker.fake_gpu import FakeGpu

MIB = 2**20
PROMPT = [3, 1, 4, 1, 5] * 5
DEVICES: dict[str, Callable[[], Any]] = {"cpu": CpuDevice, "gpu": FakeGpu}


@pytest.fixture(params=DEVICES)
def engine(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLMEngine]:
    monkeypatch.setattr(uniproc, "make_device", lambda name: DEVICES[request.param]())
    engine = started(tiny_model("llama"))
    yield engine
    engine.shutdown()


def started(model: Path, **args: Any) -> LLMEngine:
    limits = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 20,
    }
    return LLMEngine(EngineConfig.from_args(model=str(model), cpu_threads=1, **limits | args))


def tokens(engine: LLMEngine, *, nap: int | None = None, prompt: list[int] = PROMPT) -> list[int]:
    """Return the generated tokens; with `nap`, the engine sleeps at this level once in the middle."""
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE)
    engine.add_request("a", list(prompt), params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if nap is not None and outputs and len(outputs[-1].outputs[0].token_ids) > 3:
            engine.sleep(nap, "keep")
            engine.wake_up()
            nap = None
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.more
@pytest.mark.parametrize("overlapped", [False, True])
def test_tokens_are_those_of_an_engine_that_never_slept(
    overlapped: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for make in DEVICES.values():
        with monkeypatch.context() as patch:
            patch.setattr(uniproc, "make_device", lambda name, make=make: make())
            engine = started(tiny_model("llama"), async_scheduling=overlapped)
        expected = tokens(engine)
        assert [tokens(engine, nap=level) for level in (0, 1, 2)] == [expected] * 3
        engine.shutdown()


@pytest.mark.more
def test_memory_wakes_part_by_part(engine: LLMEngine) -> None:
    expected = tokens(engine)
    for level in (1, 2):
        engine.sleep(level)
        for tag in ("weights", "kv_cache"):
            assert engine.is_sleeping
            engine.wake_up([tag])
        assert not engine.is_sleeping
        assert tokens(engine) == expected


def test_sleep_on_a_host_keeps_recorded_graphs(tiny_model: Callable[[str], Path]) -> None:
    engine = started(tiny_model("llama"))
    expected = tokens(engine)
    worker = engine._clients[0]._core.executor._worker  # type: ignore[attr-defined]
    runner = worker._runner
    engine.sleep(1)
    engine.wake_up()
    assert worker._runner is runner
    assert tokens(engine) == expected
    engine.shutdown()


@pytest.mark.more
def test_deeper_sleep_drops_parked_weights(engine: LLMEngine) -> None:
    expected = tokens(engine)
    for level in (1, 2, 1):
        engine.sleep(level)
    worker = engine._clients[0]._core.executor._worker  # type: ignore[attr-defined]
    assert worker._model is None
    assert worker._parked is None
    engine.wake_up()
    assert tokens(engine) == expected


def test_engine_that_fails_to_wake_stays_asleep(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is gone, or memory that others have taken: the operator may try again."""
    expected = tokens(engine)
    engine.sleep(2)
    failures = {
        "load_model": step_worker.StartupError("there is none"),
        "allocate_kv_cache": RuntimeError("no memory"),
    }
    for failing, error in failures.items():
        with monkeypatch.context() as patch:
            patch.setattr(step_worker, failing, Mock(side_effect=error))
            for _ in range(2):
                with pytest.raises(EngineError, match="wake_up"):
                    engine.wake_up()
    assert engine.is_sleeping
    engine.wake_up()
    assert tokens(engine) == expected


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_parked_weights_leave_nothing_behind_and_come_back(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    """Views of tied tables and of a draft model's weights share their memory again after a restore."""
    models = [load_model(prepared_config(tiny_model(name))) for name in (family, "llama")]
    held = [
        tensor
        for model in models
        for _, layer in model.checkpoint_layers()
        for tensor in layer.tensors().values()
    ]
    held += [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    before = [tensor.clone() for tensor in held]
    parked = ParkedWeights(models, FakeGpu())
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    parked.restore()
    assert all(torch.equal(now, then) for now, then in zip(held, before, strict=True))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights and cache show in a process's memory: 64 MiB, and 32 KiB for each token."""
    directory = tmp_path_factory.mktemp("wide")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.more
def test_memory_really_goes_back_to_the_system(wide_model: Path) -> None:
    args = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 140}
    config = EngineConfig.from_args(
        model=str(wide_model),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        device="cpu",
        **args,
    )
    engine = LLMEngine(config, in_process=False)
    (client,) = engine._clients
    assert isinstance(client, ProcessClient)

    def resident() -> int:
        status = Path(f"/proc/{client.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    prompt = [i % 1000 for i in range(1900)]
    num_weights = 4 * 1024 * (1000 * 2 + 4 * (4 * 1024 + 3 * 512))
    num_cached = len(prompt) * 4 * 2 * 1024 * 4
    loaded = resident()
    expected = tokens(engine, prompt=prompt)
    used = resident()
    assert used - loaded > num_cached * 0.9
    engine.sleep(1)
    assert used - resident() > num_cached * 0.9
    engine.sleep(2)
    assert used - resident() > (num_cached + num_weights) * 0.9
    engine.wake_up()
    assert loaded - resident() < num_weights * 0.1
    assert tokens(engine, prompt=prompt) == expected
    engine.shutdown()


def test_dropped_models_and_runners_are_in_no_cycle(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each sleep and update takes a collection of all garbage, a tenth of a second."""
    collections = Mock()
    monkeypatch.setattr(worker_module, "collect_garbage", collections)
    path = tiny_model("llama")
    engine = started(path)
    expected = tokens(engine)
    gc.disable()
    try:
        for level in (1, 2):
            engine.sleep(level)
            engine.wake_up()
        engine.sleep(0)
        engine.replace_weights(str(path), "again")
        engine.wake_up()
    finally:
        gc.enable()
    assert collections.call_count == 0
    assert tokens(engine) == expected
    engine.shutdown()
