# SPDX-License-Identifier: Apache-2.0
"""The product that the GPU kernels' equality tests stand on, in Triton's interpreter."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton for this platform")
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    sums = np.zeros((a.shape[0], b.shape[1]), np.float32)
    factors = [TensorHandle(x, tl.float32) for x in (a, b)]
    return interpreter_builder.create_dot(*factors, TensorHandle(sums, tl.float32), None, 0).data


def test_element_has_the_same_bits_in_any_matmul_and_layout() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((33, 70), (70, 65)))
    whole = dot(a, b)
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b, atol=1e-4)
    for count in (1, 2, 3, 8, 16, 31):
        assert np.array_equal(dot(a[:count], b), whole[:count])
        assert np.array_equal(dot(a, b[:, :count]), whole[:, :count])
    assert np.array_equal(dot(np.asfortranarray(a), np.asfortranarray(b)), whole)
    assert np.array_equal(dot(b.T, a.T), whole.T)


def test_an_element_adds_up_its_products_in_order() -> None:
    a, b = np.float32([[1, 1e8, 1, -1e8]]), np.ones((4, 1), np.float32)
    assert dot(a, b).item() == 0.0
    assert dot(a[:, [1, 3, 0, 2]], b).item() == 2.0
