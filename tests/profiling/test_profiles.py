# SPDX-License-Identifier: Apache-2.0
"""Profiles by `LLM` and by the server's routes: files, order of calls, bounds, and results that stay the same."""

from __future__ import annotations

import gzip
import json
import pstats
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import DEMO_MODEL, EngineConfig
from quire.config.observability import ObservabilityConfig
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, ValidationError
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for

GREEDY = SamplingParams(temperature=0, max_tokens=6)
PROMPT = "The capital of France is"


def made(directory: Path, profiler: str, **keys: Any) -> LLM:
    config = {"profiler": profiler, "torch_profiler_dir": str(directory), **keys}
    return LLM(DEMO_MODEL, max_model_len=128, profiler_config=config)


def text_of(llm: LLM) -> str:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("profiler", ["torch", "cprofile"])
def test_profile_is_written_and_changes_no_text(profiler: str, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "profiles"
    llm = made(directory, profiler, torch_profiler_with_stack=False)
    expected = text_of(llm)
    with pytest.raises(ValidationError, match="no profile is running"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(ValidationError, match="a profile is running"):
        llm.start_profile()
    assert text_of(llm) == expected
    (path,) = llm.stop_profile()
    assert Path(path).parent == directory
    if profiler == "torch":
        trace = json.loads(gzip.decompress(Path(path).read_bytes()))
        assert any(str(event.get("name")).startswith("aten::") for event in trace["traceEvents"])
    else:
        functions = {name for _, _, name in pstats.Stats(path).stats}  # type: ignore[attr-defined]
        assert "submit" in functions
    llm.start_profile()
    (second,) = llm.stop_profile()
    assert second != path
    llm.start_profile()  # one that is left running ends with the engine
    llm.shutdown()
    assert len(list(directory.iterdir())) == 3


def test_profile_ends_by_itself_after_its_steps(tmp_path: Path) -> None:
    llm = made(tmp_path, "cprofile", max_iterations=2)
    llm.start_profile()
    text_of(llm)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValidationError, match="no profile is running"):
        llm.stop_profile()
    llm.shutdown()


def test_unwritable_directory_ends_no_engine(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    llm = made(tmp_path / "file", "cprofile")
    llm.start_profile()
    with pytest.raises(ValidationError, match="the profiler failed"):
        llm.stop_profile()
    assert text_of(llm)
    llm.shutdown()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"profiler": "torch"}, 'needs a "torch_profiler_dir"'),
        ({"torch_profiler_dir": "x"}, 'needs a "profiler"'),
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, "profiler"),
        ({"profiler": "torch", "dir": "x"}, "dir"),
        ({"profiler": "torch", "torch_profiler_dir": "x", "max_iterations": 0}, "max_iterations"),
    ],
)
def test_mistakes_are_named_before_the_start(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ObservabilityConfig(profiler_config=config)


async def test_routes_write_profiles_of_a_server(tmp_path: Path) -> None:
    config = {"profiler": "cprofile", "torch_profiler_dir": str(tmp_path)}
    args = {"max_model_len": 128, "profiler_config": config}
    engine = AsyncLLM(EngineConfig.from_args(model=DEMO_MODEL, **args), in_process=True)
    async with client_for(engine, admin_api_key="admin") as client:  # type: ignore[arg-type]
        await engine.wait_ready()
        assert (await client.post("/start_profile")).status_code == 401
        client.headers["authorization"] = "Bearer admin"
        assert (await client.post("/stop_profile")).status_code == 400
        assert (await client.post("/start_profile")).json() == {"is_running": True, "files": []}
        await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        (file,) = (await client.post("/stop_profile")).json()["files"]
    await engine.shutdown()
    assert [str(path) for path in tmp_path.iterdir()] == [file]  # noqa: ASYNC240


def test_profile_without_the_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="--profiler-config"):
        ObservabilityConfig().require_profiler()


async def test_routes_without_the_option_are_refused() -> None:
    engine: Any = FakeEngine()
    engine.start_profile = AsyncLLM.start_profile.__get__(engine)
    async with client_for(engine, admin_api_key="admin") as client:
        response = await client.post("/start_profile", headers={"authorization": "Bearer admin"})
        assert response.status_code == 400
        assert "--profiler-config" in response.json()["error"]["message"]
