# SPDX-License-Identifier: Apache-2.0
"""`quire trace` on what `--record-trace` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.cli.main import EXIT_USAGE, main
from quire.sampling_params import SamplingParams


def test_a_run_is_summed_up_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.trace"
    engine = LLMEngine(EngineConfig.from_args(record_trace=str(file), distributed_executor_backend="null"))
    for number in range(3):
        engine.add_request(
            str(number), {"prompt_token_ids": [3] * 20}, SamplingParams(max_tokens=5, ignore_eos=True)
        )
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    assert main(["trace", str(file), "--replay"]) == 0
    printed = capsys.readouterr().out
    assert "requests  3, ended: 3 length; 0 preemptions" in printed
    assert "tokens    60 of prompts" in printed
    assert "replayed  5 plans, all equal" in printed


def test_unreadable_trace_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == EXIT_USAGE
    assert "cannot read" in capsys.readouterr().err
