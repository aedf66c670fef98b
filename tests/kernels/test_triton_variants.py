# SPDX-License-Identifier: Apache-2.0
"""No number that varies from step to step makes a kernel be compiled anew; in a process of its own, where none is
interpreted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="no Triton for this platform")


@pytest.mark.more
def test_kernel_has_one_variant_for_all_batches() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.recorded_variants"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("several:")] == []
    assert lines[-2] == "not launched: []"
    assert lines[-1].startswith("kernels:")
