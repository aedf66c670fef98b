"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported: OpenMP threads that spin while they wait starve the other processes of a test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from tests.fixtures.tiny_models import write_tiny_model
from tests.kernels import triton_interpreter

triton_interpreter.start()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of `TINY_MODELS` -> directory of that checkpoint, written once in a session; do not change its files."""
    written: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in written:
            written[name] = write_tiny_model(name, tmp_path_factory.mktemp(name))
        return written[name]

    return directory
