"""A server with adapters, from outside: what `model` names is what answers, also after its core has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.end_to_end.server import Server
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter


def test_each_name_answers_as_itself(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    del shapes["lm_head"]
    names = [f"adapter-{number}" for number in range(3)]
    modules = [f"{name}={write_adapter(tmp_path / name, shapes, seed=i)}" for i, name in enumerate(names)]
    flags = [word for module in modules for word in ("--lora-modules", module)]
    flags += [
        "--enable-lora",
        "--max-loras",
        "2",
        "--served-model-name",
        "base",
        "--kv-cache-memory-bytes",
        "16M",
    ]
    server = Server(str(tiny_model("llama")), *flags, log=tmp_path / "log").wait_ready()

    def answer(model: str) -> str:
        body = {
            "model": model,
            "prompt": "Good morning",
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert reply["model"] == model
        return str(reply["choices"][0]["text"])

    try:
        alone = {name: answer(name) for name in ("base", *names)}
        assert len({*alone.values()}) == 4, "they say the same"
        many = [name for name in alone for _ in range(4)]
        with ThreadPoolExecutor(len(many)) as pool:
            assert list(pool.map(answer, many)) == [alone[name] for name in many]
        core = server.core_pid()
        assert core is not None
        os.kill(core, signal.SIGKILL)
        server.wait_ready()
        assert {name: answer(name) for name in alone} == alone
    finally:
        server.stop()
