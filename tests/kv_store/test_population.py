# SPDX-License-Identifier: Apache-2.0
"""Memory populated ahead: the first blocks only, and what they contain stays."""

import ctypes
import sys

import numpy as np
import pytest
import torch

from quire.kernels.cpu.arena import HUGE_PAGE, discard_pages, huge_page_blocks
from quire.kv_store import population
from quire.kv_store.population import Population

PAGE, BLOCK_BYTES = 4096, 8192
BLOCKS_OF_PAGE = HUGE_PAGE // BLOCK_BYTES

if sys.platform != "linux":
    pytest.skip("only Linux populates memory", allow_module_level=True)


def resident(tensor: torch.Tensor) -> list[bool]:
    """Return for each huge page of a tensor whether all of it is in memory."""
    pages = np.zeros(tensor.nbytes // PAGE, np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    assert mincore(tensor.data_ptr(), tensor.nbytes, pages.ctypes.data) == 0
    return list((pages.reshape(-1, HUGE_PAGE // PAGE) & 1).all(1))


def fresh_blocks(num_pages: int) -> torch.Tensor:
    """Return blocks on so many huge pages that are not in memory, which those of earlier tests may be."""
    blocks = huge_page_blocks(num_pages * BLOCKS_OF_PAGE, BLOCK_BYTES)
    assert discard_pages(blocks)
    return blocks


def test_population_covers_the_first_blocks_only(caplog: pytest.LogCaptureFixture) -> None:
    host, cache = fresh_blocks(4), fresh_blocks(3)
    host[:BLOCKS_OF_PAGE] = 7
    caplog.set_level("INFO", population.__name__)
    memory = Population([host, cache, torch.empty(9, BLOCK_BYTES, dtype=torch.uint8)], 2 * BLOCKS_OF_PAGE)
    memory.wait()
    if "does not populate" in caplog.text:
        pytest.skip("before Linux 5.14")
    assert (resident(host), resident(cache)) == ([True, True, False, False], [True, True, False])
    assert (host[:BLOCKS_OF_PAGE] == 7).all()
    memory.stop()


def test_population_has_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "MOST_BYTES", 0)
    blocks = fresh_blocks(1)
    Population([blocks], BLOCKS_OF_PAGE).wait()
    assert resident(blocks) == [False]
