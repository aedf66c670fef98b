# SPDX-License-Identifier: Apache-2.0
"""Numbers below the normal ones count, on every thread and whatever mode the thread that calls is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.cpu.library import as_in_kernels, set_num_threads
from quire.kernels.linear import FLOAT
from tests.fixtures.threads import shuffle

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("restore_threads")

TINY = 1e-40
MORE_THREADS = 13
"""Than other tests have, so that some of them are started while the mode is another."""


@pytest.fixture
def flushing() -> Iterator[None]:
    """Flush denormal numbers to 0, as some libraries set the thread that loads them."""
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot set the mode of this processor")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def flushes() -> bool:
    return float(torch.tensor([TINY]) * 1.0) == 0.0


def start_threads() -> None:
    """Those that are wanted, by a thread in its own mode."""
    loaded = library.loaded()
    assert loaded is not None
    loaded.share(100, 1 << 40, library.SHARED_BODY(lambda *_: None), None)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def product(dtype: torch.dtype) -> Callable[[], Tensor]:
    weight, x = ops.pack_weight((numbers(600, 64) * TINY).to(dtype), FLOAT), numbers(5, 64)
    return lambda: ops.packed_linear(x, weight)


def activation() -> Callable[[], Tensor]:
    gate, up = numbers(2, 40, 128)
    x = torch.cat((gate, up * TINY), 1)
    return lambda: ops.silu_and_mul(x)


def norm() -> Callable[[], Tensor]:
    x, weight = numbers(40, 256), torch.full((256,), TINY)
    return lambda: ops.rms_norm(x, weight, 1e-6)


@pytest.mark.parametrize(
    "compute",
    [product(torch.float32), product(torch.bfloat16), activation(), norm()],
    ids=["float32", "bfloat16", "silu_and_mul", "rms_norm"],
)
def test_tiny_numbers_have_the_same_bits_on_any_threads(
    compute: Callable[[], Tensor], request: pytest.FixtureRequest
) -> None:
    set_num_threads(1)
    expected = compute()
    assert 0 < expected.abs().max() < 1e-37
    request.getfixturevalue("flushing")
    for threads in (1, 2, 3, MORE_THREADS):
        set_num_threads(threads)
        start_threads()
        for seed in (0, 1, 5):
            shuffle(seed)
            assert torch.equal(compute().view(torch.int32), expected.view(torch.int32)), (threads, seed)
    assert flushes(), "the caller's mode is his own"


@pytest.mark.usefixtures("flushing")
def test_torch_counts_them_too_within_a_step() -> None:
    with as_in_kernels():
        assert not flushes()
        with as_in_kernels():
            assert not flushes()
        assert not flushes()
    assert flushes()


@pytest.mark.usefixtures("flushing")
def test_failure_restores_the_float_mode() -> None:
    with pytest.raises(ZeroDivisionError), as_in_kernels():
        raise ZeroDivisionError
    assert flushes()
