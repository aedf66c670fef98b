# SPDX-License-Identifier: Apache-2.0
"""The training script runs: two steps of a small batch, and what it exports is a model that quire loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from demo_model import train
from quire import LLM, SamplingParams


@pytest.mark.more
def test_two_steps_make_a_model_that_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 128)
    monkeypatch.setattr(train, "POOL", 8)
    arguments = ["--steps", "2", "--work-dir", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    for folder in ("work", "out"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    train.main()
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {"model.safetensors"}
    llm = LLM(str(tmp_path / "out"), max_model_len=64)
    (output,) = llm.generate(["Hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    llm.shutdown()
