# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose files change under a running engine is never taken for the one that it has loaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.file_states import check_files, states_of
from quire.engine.front_end import FrontEnd
from quire.engine.startup import prepare
from quire.engine.tokenizer_cache import load_vocabulary
from quire.errors import EngineDeadError, EngineError, ModelLoadError
from quire.sampling_params import SamplingParams
from tests.engine.test_restart import collect, params, process_of, started

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "2_Dense/config.json")


@pytest.fixture
def model(null_model_dir: Path, tmp_path: Path) -> Path:
    """A model directory of this test's own."""
    directory = tmp_path / "model"
    shutil.copytree(null_model_dir, directory)
    return directory


def replaced(path: Path) -> None:
    draft = path.with_suffix(".new")
    shutil.copy2(path, draft)
    draft.rename(path)


def rewritten(path: Path) -> None:
    """The same size and modification time."""
    times, content = path.stat(), path.read_bytes()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize("change", [replaced, rewritten, touched, grown, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_check_files_any_change_is_refused(model: Path, name: str, change: Callable[[Path], None]) -> None:
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "config.json").write_text("{}")
    (model / "modules.json").write_text('[{"path": "2_Dense"}]')
    config = EngineConfig(model_dir=str(model), files=states_of(EngineConfig(model_dir=str(model))))
    check_files(config)
    change(model / name)
    with pytest.raises(ModelLoadError, match=f"have changed.*{name}.*start the program again"):
        check_files(config)


@pytest.mark.parametrize(
    "name", ["added_tokens.json", "model-00001-of-00002.safetensors", "chat_template.jinja"]
)
def test_check_files_new_file_is_refused(model: Path, name: str) -> None:
    config = EngineConfig(model_dir=str(model), files=states_of(EngineConfig(model_dir=str(model))))
    (model / name).write_text("{}")
    with pytest.raises(ModelLoadError, match=name):
        check_files(config)


def test_check_files_unread_files_may_change(model: Path) -> None:
    config = EngineConfig(model_dir=str(model), files=states_of(EngineConfig(model_dir=str(model))))
    (model / "README.md").write_text("new")
    (model / "checkpoint-5").mkdir()
    (model / "checkpoint-5" / "config.json").write_text("{}")
    check_files(config)


def test_front_end_with_another_tokenizer_is_refused(model: Path) -> None:
    config = prepare(EngineConfig.from_args(model=str(model)), "server")
    replaced(model / "tokenizer.json")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        FrontEnd(config)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_vocabulary(config)


@pytest.mark.item(54)
async def test_core_with_changed_files_is_not_replaced(model: Path) -> None:
    engine = await started(model)

    def deploy_and_kill() -> None:
        if process_of(engine).poll() is None:
            replaced(model / "config.json")
            process_of(engine).kill()

    with pytest.raises(EngineDeadError, match=r"not replaced: files of the model have changed.*config\.json"):
        await collect(engine, [1, 2, 3], params(max_tokens=100), on_output=deploy_and_kill)
    assert engine.errored
    with pytest.raises(EngineDeadError, match=r"config\.json"):
        await engine.check_health()
    await engine.shutdown()


async def test_core_that_reads_changed_files_does_not_start(model: Path) -> None:
    config = prepare(EngineConfig.from_args(model=str(model), distributed_executor_backend="null"), "server")
    replaced(model / "config.json")
    from quire.engine.core import EngineCore

    with pytest.raises(ModelLoadError, match=r"config\.json"):
        EngineCore(config)


async def test_wake_up_with_changed_weights_is_refused(model: Path) -> None:
    config = EngineConfig.from_args(model=str(model), distributed_executor_backend="null")
    engine = AsyncLLM(config, in_process=True)
    await engine.wait_ready()
    await engine.sleep(level=2)
    replaced(model / "config.json")
    with pytest.raises(EngineError, match="wake_up"):
        await engine.wake_up()
    assert engine.is_sleeping
    await engine.shutdown()


async def test_core_with_the_same_files_is_replaced(model: Path) -> None:
    engine = await started(model)
    before = await collect(engine, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=5))
    process_of(engine).kill()
    after = await collect(engine, [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, seed=5))
    assert before.outputs[0].token_ids == after.outputs[0].token_ids
    await engine.shutdown()
