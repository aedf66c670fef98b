"""No kernel of a GPU is compiled once its engine has started; in a process of its own, where none is interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter


@pytest.mark.more
def test_every_variant_of_a_kernel_is_asked_for_before_the_first_request(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    adapter = write_adapter(tmp_path, {name: shape for name, shape in shapes.items() if name != "lm_head"})
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.worker.recorded_launches", str(tiny_model("llama")), str(adapter)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("late:")] == []
    assert result.stdout.splitlines()[-1].startswith("asked for before the first request:")
