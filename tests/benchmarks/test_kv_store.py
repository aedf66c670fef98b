# SPDX-License-Identifier: Apache-2.0
"""The benchmark of engines with a KV store runs, on a model that shows nothing of its speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import kv_store_engines
from benchmarks.made_up import written


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("step --num-rounds 2 --num-tokens 12", "with a store"),
        pytest.param(
            "restart --prompt-tokens 400 --num-rounds 1", "cached_tokens 384", marks=pytest.mark.more
        ),
        pytest.param(
            "decode --num-rounds 2 --prompt-tokens 400 --num-tokens 12",
            "writing behind takes",
            marks=pytest.mark.more,
        ),
        pytest.param(
            "apart --seconds 3 --prompt-tokens 400",
            "prefill 1, decode 1",
            marks=[
                pytest.mark.more,
                pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="needs cores 0 and 1"),
            ],
        ),
    ],
)
def test_each_part_of_the_benchmark_reports(
    arguments: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, **kv_store_engines.TINY)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (model / "config.json").write_text(json.dumps(config))
    kv_store_engines.main([*arguments.split(), "--model", str(model), "--directory", str(tmp_path)])
    assert words in capsys.readouterr().out
