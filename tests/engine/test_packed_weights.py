# SPDX-License-Identifier: Apache-2.0
"""The cache of packed weights is on by default where it saves time and the files permit it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine import packed_weights
from quire.engine.startup import prepare
from quire.kernels import cpu
from quire.models.bounded_directory import user_cache

PROGRAM = """
import sys
from quire import LLM, SamplingParams
from quire.engine import packed_weights
packed_weights.MIN_BYTES = 1
llm = LLM(sys.argv[1], skip_tokenizer_init=True, device="cpu", max_model_len=64, kv_cache_memory_bytes=2**20)
(output,) = llm.generate([{"prompt_token_ids": [5, 9, 100, 3]}], SamplingParams(max_tokens=8, temperature=0.0))
print(output.outputs[0].token_ids)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 1)
    monkeypatch.setattr(cpu, "available", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def chosen(model: Path, **options: Any) -> str | None:
    options = {"device": "cpu", "skip_tokenizer_init": True} | options
    config = prepare(EngineConfig.from_args(model=str(model), **options), "offline")
    return config.load.packed_weights_cache if config.load.enable_packed_weights_cache else None


def test_prepare_large_weights_chooses_the_users_cache(home: Path, tiny_model: Callable[[str], Path]) -> None:
    assert chosen(tiny_model("llama")) == str(home / "quire" / "packed")


@pytest.mark.parametrize(
    "options",
    [{"load_format": "dummy"}, {"enable_packed_weights_cache": False}, {"packed_weights_cache_gib": 1e-6}],
    ids=["dummy", "switched off", "over the limit"],
)
def test_prepare_keeps_nothing_that_is_not_wanted(
    options: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    assert chosen(tiny_model("llama"), **options) is None


def test_prepare_small_weights_are_packed_anew(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "MIN_BYTES", 2**26)
    assert chosen(tiny_model("llama")) is None
    assert chosen(tiny_model("llama"), packed_weights_cache="/named") == "/named"


def test_prepare_without_kernels_keeps_nothing(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    assert chosen(tiny_model("llama")) is None


def test_prepare_transformers_model_keeps_nothing(tiny_model: Callable[[str], Path]) -> None:
    assert chosen(tiny_model("llama"), model_impl="transformers") is None


def test_user_cache_without_a_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    assert user_cache() == Path.home() / ".cache"
    monkeypatch.setattr(Path, "home", homeless)
    assert user_cache() is None


def start(model: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(model: Path) -> str:
    """Return what PROGRAM prints, from an engine of this process."""
    llm = LLM(
        str(model), skip_tokenizer_init=True, device="cpu", max_model_len=64, kv_cache_memory_bytes=2**20
    )
    prompt, params = {"prompt_token_ids": [5, 9, 100, 3]}, SamplingParams(max_tokens=8, temperature=0.0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    llm.shutdown()
    return f"{output.outputs[0].token_ids}\n"


@pytest.mark.more
def test_two_engines_that_start_at_once_leave_one_file(
    home: Path, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    if not cpu.PATH.exists():
        pytest.skip("there are no kernels")
    both = [start(tiny_model("llama"), home) for _ in range(2)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (file,) = (home / "quire" / "packed").iterdir()
    before = file.read_bytes()
    assert {text for text, _ in outputs} == {answer(tiny_model("llama"))}
    assert file.read_bytes() == before


def test_home_that_cannot_be_written_does_not_stop_a_start(
    home: Path, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture, restore_threads: None
) -> None:
    if not cpu.PATH.exists():
        pytest.skip("there are no kernels")
    home.write_text("a file in the way")
    assert answer(tiny_model("llama")).startswith("[")
    assert caplog.text.count("packed weights cannot be stored") == 1
