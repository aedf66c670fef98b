# SPDX-License-Identifier: Apache-2.0
"""Trimming of an environment: files that a server needs stay, and others go."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/docker/trim.sh"
DOCKERFILE = SCRIPT.with_name("Dockerfile.cpu").read_text(encoding="utf-8")
FURTHER = re.findall(r"trim\.sh /opt/quire (.+)", DOCKERFILE)[0].split()
KEPT = (
    "torch/bin/torch_shm_manager",  # without it torch is not imported
    "torch/testing/_comparison.py",
    "quire/kernels/cpu/library.py",
    "numpy.libs/libopenblas.so",
)
REMOVED = (
    "torch/bin/protoc",
    "torch/include/ATen/ATen.h",
    "torch/lib/libtorchbind_test.so",
    "numpy/linalg/tests/test_linalg.py",
    "quire/__pycache__/errors.cpython-313.pyc",
    "pip/__main__.py",
    "torch/_C.pyi",
    "torch/_dynamo/__init__.py",
    "torch/testing/_internal/common_utils.py",
    "sympy/core/core.py",
)


@pytest.mark.parametrize("python", ["python3.11", "python3.13"])
def test_trim_removes_files_no_server_needs(tmp_path: Path, python: str) -> None:
    packages = tmp_path / "lib" / python / "site-packages"
    for name in (*KEPT, *REMOVED):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("content")
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path), *FURTHER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [name for name in KEPT if not (packages / name).exists()] == []
    assert [name for name in REMOVED if (packages / name).exists()] == []
