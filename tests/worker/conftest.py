"""These tensors are tiny: one thread is fastest, and on a busy machine many times so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.cpu.threads import set_num_threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(before)
