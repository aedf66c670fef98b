# SPDX-License-Identifier: Apache-2.0
"""The look that every test ends with sees what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.kv_cache.integrity import IntegrityError
from quire.sampling_params import SamplingParams
from tests.end_to_end import server
from tests.end_to_end.server import MARK, check_programs, running
from tests.fixtures import invariants


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (server, invariants):
        monkeypatch.setattr(module, "ENDED_WITHIN_S", 0.0)


@pytest.fixture
def used() -> Any:
    """An engine that has answered a request, and what was noted of it."""
    begun = invariants._begun
    engine = LLMEngine(
        EngineConfig.from_args(
            model=DEMO_MODEL, distributed_executor_backend="null", num_gpu_blocks_override=200
        )
    )
    engine.add_request("a", "Hello", SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    ((scheduler, core),) = begun._cores.values()
    yield engine, scheduler, core
    engine.shutdown()


def test_unreferenced_blocks_are_detected(used: Any) -> None:
    _, scheduler, core = used
    invariants.check_scheduler(scheduler, core())
    pool = scheduler._kv._pool
    blocks = pool.get_new_blocks(1)
    with pytest.raises(IntegrityError, match="references differ from holders"):
        invariants.check_scheduler(scheduler, core())
    pool.free(blocks)


def test_orphaned_front_end_state_is_detected(used: Any) -> None:
    engine, *_ = used
    invariants.check_front_end(engine._front_end)
    engine._front_end.router._awaiting_update["a"] = "b"
    with pytest.raises(AssertionError, match="'unheard'"):
        invariants.check_front_end(engine._front_end)
    del engine._front_end.router._awaiting_update["a"]


@pytest.mark.usefixtures("impatient")
def test_a_program_that_is_left_is_seen_and_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)", "quire.pretender"]
    process = subprocess.Popen(command, env={**os.environ, MARK: "a mark"})
    assert invariants._begun.has_started_programs
    while process.pid not in running("a mark"):
        assert process.poll() is None
    with pytest.raises(AssertionError, match=r"programs are left: .*quire\.pretender"):
        check_programs("a mark")
    assert process.wait(30) < 0
    check_programs("a mark")


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_is_left_is_seen(tmp_path: Path) -> None:
    begun = invariants.Begun()
    begun.note_folder(tmp_path / "gone")
    begun.check()
    begun.note_folder(tmp_path)
    with pytest.raises(AssertionError, match="folders are left"):
        begun.check()
