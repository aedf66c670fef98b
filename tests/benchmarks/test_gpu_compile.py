# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels compile for an H100; in a process of its own, since Triton's interpreter rules that of the tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")


PARTS = 4
"""In each of which it takes a minute or two."""


@pytest.mark.more
@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_compiles_without_a_gpu(part: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--quick", "--arch", "sm_90", "--part", str(part), "--parts", str(PARTS)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "kernels compiled for sm_90, 0 failures" in result.stdout
    assert int(result.stdout.splitlines()[-1].split()[0]) > 20
    assert "wgmma" in result.stdout
