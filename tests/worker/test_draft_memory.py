# SPDX-License-Identifier: Apache-2.0
"""Test of the memory kept for drafting, which is counted before the KV cache is sized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.startup import prepare
from quire.scheduler.output import SchedulerOutput
from quire.spec_decode.worker.drafting import DraftingPart
from quire.spec_decode.worker.head_chain import HeadChain, Medusa
from quire.spec_decode.worker.proposer import kept_bytes, passing_bytes
from quire.worker.cpu import CpuDevice
from quire.worker.model_runner import LaunchedStep, ModelRunner
from quire.worker.worker import Worker
from tests.end_to_end.test_draft_heads import MODEL, guessing
from tests.fixtures.draft_heads import HEADS


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_memory_kept_by_draft_heads_is_counted(
    name: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restore_threads: None,
) -> None:
    heads = HEADS[name].write(tmp_path / "heads")
    args: dict[str, Any] = {"model": str(tiny_model(MODEL)), "max_model_len": 96, "max_num_seqs": 5}
    args |= {"device": "cpu", "cpu_threads": 1, "max_num_batched_tokens": 48, "num_scheduler_steps": 1}
    config = prepare(EngineConfig.from_args(**args, **guessing(heads, name)), "offline")
    runners: list[ModelRunner] = []
    launch, device = ModelRunner.launch, CpuDevice()

    def noted(runner: ModelRunner, plan: SchedulerOutput) -> LaunchedStep:
        runners.append(runner)
        return launch(runner, plan)

    monkeypatch.setattr(ModelRunner, "launch", noted)
    Worker(config, device).load()
    (part,) = runners[-1].parts
    assert isinstance(part, DraftingPart)
    guesses = part.proposer
    if isinstance(guesses, HeadChain):
        held = guesses._kept._states.nbytes + guesses._behind.nbytes
    else:
        assert isinstance(guesses, Medusa)
        held = guesses._states._states.nbytes
    assert held <= kept_bytes(config) <= held + 5 * 64 * 4
    plain = prepare(EngineConfig.from_args(**args), "offline")
    more = device.memory._working_bytes(config)[0] - device.memory._working_bytes(plain)[0]
    assert more == kept_bytes(config) + 48 * passing_bytes(config) > 0
