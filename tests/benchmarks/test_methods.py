# SPDX-License-Identifier: Apache-2.0
"""Methods of `quire quantize` are written, measured and listed in a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.methods import compared
from quire.quantize.grid import IntegerGrid


def test_every_method_has_a_row(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    lines = compared(tiny_model("llama"), ["rtn", "gptq"], IntegerGrid(8, 32), 1, (1, 8), tmp_path)
    assert [line.split(" | ")[0] for line in lines] == ["| `rtn`", "| `gptq`"]
    assert all(0 < float(line.split(" | ")[1]) < 0.1 for line in lines)
