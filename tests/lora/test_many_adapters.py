# SPDX-License-Identifier: Apache-2.0
"""A thousand adapters in turn leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

NUM_KEPT = 32
SPARE_BYTES = 24 * 2**20
"""What an allocator may keep. A thousand adapters of this model are 80 MiB."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""glibc's allocator keeps one for each thread that was ever busy at the same time, which is nobody's leak."""


@pytest.mark.more
def test_a_thousand_adapters_in_turn_leave_nothing_behind(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    del shapes["lm_head"]
    paths = [str(write_adapter(tmp_path / str(n), shapes, rank=16, seed=n)) for n in range(3)]
    command = [
        sys.executable,
        "-m",
        "tests.lora.many_adapters",
        str(tiny_model("llama")),
        str(NUM_KEPT),
        *paths,
    ]
    done = subprocess.run(command, env=os.environ | ONE_ARENA, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    early, late = told["stages"]
    assert late["bytes"] < early["bytes"] + SPARE_BYTES
    assert late["files"] <= early["files"]
    assert (told["texts"], told["kept"], told["usage"]) == (len(paths), NUM_KEPT, 0)
