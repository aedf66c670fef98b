# SPDX-License-Identifier: Apache-2.0
"""No kernel of a GPU is compiled once its engine has started; in a process of its own, where none is interpreted."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

MODELS = ("llama", "mixtral", "deepseekv3", "bamba", "qwen3next")
NUM_ENGINES = 18
"""Of `recorded_launches`, which wants a process without Triton's interpreter."""


@pytest.mark.more
@pytest.mark.parametrize("first", range(0, NUM_ENGINES, 3))
def test_every_kernel_variant_compiles_before_the_first_request(
    first: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """And before the graphs that have it, in which nothing can be compiled."""
    for name in MODELS:
        (tmp_path / name).symlink_to(tiny_model(name))
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    weights = {name: shape for name, shape in shapes.items() if name != "lm_head"}
    adapter = write_adapter(tmp_path / "adapter", weights)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    engines = map(str, range(first, min(first + 3, NUM_ENGINES)))
    result = subprocess.run(
        [sys.executable, "-m", "tests.worker.recorded_launches", str(tmp_path), str(adapter), *engines],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("late:")] == []
    assert result.stdout.splitlines()[-1].startswith("asked for before the first request:")


def test_engines_are_those_that_are_recorded() -> None:
    listed = ast.parse((Path(__file__).parent / "recorded_launches.py").read_text())
    tables = (node for node in ast.walk(listed) if isinstance(node, ast.AnnAssign))
    table = next(node.value for node in tables if ast.unparse(node.target) == "ENGINES")
    rows = [ast.unparse(row.elts[0]) for row in table.elts]
    assert len(rows) == NUM_ENGINES
    assert {*map(ast.literal_eval, rows)} == {*MODELS}
