"""Memory that large results leave is lent again, to one at a time, and is never more than was in use at once."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu import calls
from quire.kernels.cpu.kept_memory import KEPT, LARGE, MOST_WASTED, KeptMemory
from quire.worker.step_memory import AllocationPeak

NUM_FLOATS = st.sampled_from([1, 1000, 1024, 1200, 1300, 5000, 6000])


@given(st.lists(st.tuples(NUM_FLOATS, st.integers(0, 5)), max_size=60))
def test_tensors_that_are_in_use_share_nothing_and_what_is_kept_was_in_use_at_once(
    asked: list[tuple[int, int]],
) -> None:
    kept, held, most = KeptMemory(), {}, 0
    for number, (num_floats, place) in enumerate(asked):
        held.pop(place, None)
        held[place] = (kept.empty((num_floats,), torch.float32).fill_(number), number)
        most = max(most, sum(tensor.nbytes for tensor, _ in held.values()))
        assert all((tensor == written).all() for tensor, written in held.values())
        assert kept.num_bytes <= most * (1 + MOST_WASTED)
    held.clear()
    kept.clear()
    assert kept.num_bytes == 0


def test_a_view_keeps_what_it_looks_at() -> None:
    kept = KeptMemory()
    view = kept.empty((2, 1000), torch.float32).fill_(1.0)[1]
    kept.empty((2, 1000), torch.float32).fill_(2.0)
    assert (view == 1.0).all()


def test_memory_is_lent_again_to_what_is_as_long_or_a_little_shorter() -> None:
    kept = KeptMemory()
    address = kept.empty((1000,), torch.float32).data_ptr()
    assert kept.empty((250, 2, 2), torch.int32).data_ptr() == address
    assert kept.empty((900,), torch.float32).data_ptr() == address
    assert kept.num_bytes == 4000
    kept.empty((500,), torch.float32)
    assert kept.num_bytes == 2000, "there was never more than one in use"


def test_threads_share_it() -> None:
    kept, wrong = KeptMemory(), list[int]()

    def use(number: int) -> None:
        for _ in range(300):
            tensor = kept.empty((1000,), torch.float32).fill_(number)
            if not (tensor == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kept.num_bytes <= 2 * 4 * 4000, "each asks for another while it has one"


def _large() -> Tensor:
    return calls.empty(torch.empty(0), LARGE // 4)


@pytest.fixture
def no_leftovers() -> None:
    KEPT.clear()


@pytest.mark.usefixtures("no_leftovers")
def test_large_results_of_kernels_have_such_memory_and_small_ones_have_not() -> None:
    before = KEPT.num_bytes
    address = _large().data_ptr()
    assert KEPT.num_bytes == before + LARGE
    assert _large().data_ptr() == address
    calls.empty(torch.empty(0), LARGE // 4 - 1)
    calls.empty(torch.empty(0), LARGE // 2, dtype=torch.int8)
    assert KEPT.num_bytes == before + LARGE


@pytest.mark.usefixtures("no_leftovers")
def test_who_counts_what_torch_makes_counts_them_too() -> None:
    before = KEPT.num_bytes
    with AllocationPeak() as peak:
        _large()
    assert peak.bytes == LARGE
    assert KEPT.num_bytes == before
