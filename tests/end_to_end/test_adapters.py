# SPDX-License-Identifier: Apache-2.0
"""A server with adapters, from outside: what `model` names is what answers, also after its core has died.

Adapters come and go meanwhile, and what is wrong with one is told to whoever brings it, and costs nobody else anything.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.server import Server
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

ADMIN = {"authorization": "Bearer admin"}
OPTIONS = ("--enable-lora", "--served-model-name", "base", "--kv-cache-memory-bytes", "16M")


def adapters_of(model_dir: Path, directory: Path, count: int) -> list[Path]:
    """Adapters of all linears but the head, in directories that are called a0, a1 ..."""
    shapes = linear_shapes(oracle_of(model_dir))
    del shapes["lm_head"]
    return [write_adapter(directory / f"a{number}", shapes, seed=number) for number in range(count)]


def complete(server: Server, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Good morning", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def text_of(server: Server, model: str) -> str:
    reply = complete(server, model).raise_for_status().json()
    assert reply["model"] == model
    return str(reply["choices"][0]["text"])


@pytest.mark.more
def test_each_name_answers_as_itself(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directories = adapters_of(tiny_model("llama"), tmp_path, 3)
    flags = [word for one in directories for word in ("--lora-modules", f"{one.name}={one}")]
    server = Server(
        str(tiny_model("llama")), *OPTIONS, *flags, "--max-loras", "2", log=tmp_path / "log"
    ).wait_ready()
    try:
        alone = {name: text_of(server, name) for name in ("base", "a0", "a1", "a2")}
        assert len({*alone.values()}) == 4, "they say the same"
        many = [name for name in alone for _ in range(4)]
        with ThreadPoolExecutor(len(many)) as pool:
            assert list(pool.map(lambda name: text_of(server, name), many)) == [alone[name] for name in many]
        core = server.core_pid()
        assert core is not None
        os.kill(core, signal.SIGKILL)
        server.wait_ready()
        assert {name: text_of(server, name) for name in alone} == alone
    finally:
        server.stop()


@pytest.mark.more
def test_adapters_come_and_go_in_all_processes(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    first, second, wide = adapters_of(tiny_model("llama"), tmp_path / "adapters", 3)
    write_adapter(wide, {"model.layers.0.self_attn.q_proj": (64, 64)}, rank=32)
    flags = ("--lora-dir", str(first.parent), "--admin-api-key", "admin", "--api-server-count", "2")
    server = Server(str(tiny_model("llama")), *OPTIONS, *flags, log=tmp_path / "log").wait_ready()

    def post(path: str, **body: str | bool) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body, headers=ADMIN, timeout=60)

    def everywhere(model: str) -> set[str]:
        """Each on a connection of its own, and so in turn in each process."""
        return {text_of(server, model) for _ in range(6)}

    try:
        (base,), (resolved,) = everywhere("base"), everywhere("a0")
        assert post("load", lora_name="other", lora_path=str(second)).status_code == 200
        (other,) = everywhere("other")
        assert len({base, resolved, other}) == 3
        assert post("load", lora_name="other", lora_path=str(first), load_inplace=True).status_code == 200
        assert everywhere("other") == {resolved}
        refused = complete(server, "a2")
        assert refused.status_code == 400
        assert "adapter_model.safetensors: tensor" in refused.text
        assert "has rank 32; --max-lora-rank is 16" in refused.text
        assert post("load", lora_name="x", lora_path=str(tmp_path)).status_code == 400
        assert complete(server, "x").status_code == complete(server, "../adapters/a0").status_code == 404
        core = server.core_pid()
        assert core is not None
        os.kill(core, signal.SIGKILL)
        while server.core_pid() in (None, core) or {server.health() for _ in range(6)} != {200}:
            time.sleep(0.05)
        assert everywhere("other") == everywhere("a0") == {resolved}
        assert post("unload", lora_name="other").status_code == 200
        assert {complete(server, "other").status_code for _ in range(6)} == {404}
        assert post("unload", lora_name="other").status_code == 404
        assert everywhere("base") == {base}
    finally:
        server.stop()


@pytest.mark.more
def test_server_start_with_unusable_adapters_fails(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    wrong = write_adapter(tmp_path / "wrong", {"model.layers.0.self_attn.q_proj": (64, 63)})
    worse = write_adapter(tmp_path / "worse", {"model.layers.0.self_attn.q_proj": (62, 64)})
    modules = [f"one={wrong}", f"two={worse}"]
    flags = [word for module in modules for word in ("--lora-modules", module)]
    server = Server(str(tiny_model("llama")), *OPTIONS, *flags, log=tmp_path / "log")
    assert server.process.wait(120) == 2
    log = (tmp_path / "log").read_text()
    assert "--lora-modules: adapter 'one': adapter_model.safetensors: tensor" in log
    assert "has shape [4, 63]; the model's layer implies [4, 64]" in log
    assert "adapter 'two': adapter_model.safetensors: tensor" in log
