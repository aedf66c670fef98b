# SPDX-License-Identifier: Apache-2.0
"""Huge pages: requested for large tensors, with unchanged contents."""

import re
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import library
from quire.kernels.cpu.arena import (
    HUGE_PAGE,
    discard_pages,
    huge_page_blocks,
    huge_page_memory,
    prefer_huge_pages,
)

SMAPS = Path("/proc/self/smaps")

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)


def advice(address: int) -> list[str]:
    """The kernel's flags of the memory at an address."""
    here = False
    for line in SMAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("memory of ours is mapped")


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux tells what memory is")
def test_large_allocations_request_huge_pages() -> None:
    tensor = torch.empty(8 * HUGE_PAGE, dtype=torch.uint8)
    prefer_huge_pages(tensor)
    flags = advice(tensor.data_ptr() + tensor.nbytes // 2)
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no large pages")
    assert "hg" in flags


def test_contents_stay() -> None:
    tensor = torch.arange(3 * HUGE_PAGE // 4, dtype=torch.int32)
    prefer_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(3 * HUGE_PAGE // 4, dtype=torch.int32))


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux discards")
def test_discarding_takes_whole_pages_of_the_tensor_only() -> None:
    memory, page = torch.ones(3 * HUGE_PAGE, dtype=torch.uint8), 1 << 16
    middle = memory[page + 1 : -page - 1]
    assert discard_pages(middle)
    assert not middle[page:-page].any()
    assert memory[: page + 1].all()
    assert memory[-page - 1 :].all()
    assert discard_pages(memory[:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_matrix_that_holds_a_page_begins_with_one(dtype: torch.dtype) -> None:
    like, rows = torch.empty(0), HUGE_PAGE // 1000 // dtype.itemsize
    for count in (rows, rows + 1, 3 * rows):
        memory = huge_page_memory(like, count, 1000, dtype=dtype)
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((count, 1000), dtype, True)
        assert memory.nbytes < HUGE_PAGE or memory.data_ptr() % HUGE_PAGE == 0
        memory.fill_(1)
        assert (memory == 1).all()


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux tells what memory is")
def test_first_block_of_a_cache_is_on_a_huge_page() -> None:
    blocks = huge_page_blocks(3000, 8192)
    assert (blocks.shape, blocks.dtype, blocks.is_contiguous()) == ((3000, 8192), torch.uint8, True)
    assert blocks.data_ptr() % HUGE_PAGE == 0
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in advice(blocks.data_ptr())
    assert huge_page_blocks(0, 8192).shape == (0, 8192)
