# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that tests change."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def copy_of(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint that the test may change."""
    return lambda name: Path(shutil.copytree(tiny_model(name), tmp_path / name))
