# SPDX-License-Identifier: Apache-2.0
"""These tensors are tiny: one thread is fastest, and on a busy machine many times so."""

from __future__ import annotations

import pytest

from quire.kernels.cpu.library import set_num_threads


@pytest.fixture(autouse=True)
def _one_thread(restore_threads: None) -> None:
    set_num_threads(1)
