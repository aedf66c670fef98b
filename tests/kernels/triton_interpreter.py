# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU kernels on a CPU, in Triton's interpreter.

Invariant: a row's bits depend neither on the processor nor on the number of rows. The interpreter multiplies with
numpy's BLAS, which on some processors adds up a row among many in another order than a row alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest


def start() -> None:
    """Let Triton interpret kernels, and multiply in order; to be called before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from triton.runtime import interpreter

        interpreter.InterpreterBuilder.create_dot = _dot
        interpreter._patch_lang = _once_for_each_module(interpreter._patch_lang, interpreter._LangPatchScope)
        interpreter._get_np_dtype = _once_for_each_element(interpreter._get_np_dtype)
        _make_shapes_once()


def _once_for_each_module(
    patch: Callable[[Any], object], scope: Callable[[], object]
) -> Callable[[Any], object]:
    """The interpreter's way to put its functions into Triton's language, which they then stay in.

    It would do so, and undo it, for each launch, and again for each function that a kernel calls: a third of its time.
    """
    known = set[str]()

    def once(function: Any) -> object:
        if function.__module__ not in known:
            known.add(function.__module__)
            patch(function)
        return scope()  # with nothing to undo

    return once


def _once_for_each_element(find: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """The interpreter's table of numpy's types, which it would build for each look-up."""
    known = dict[str, np.dtype]()

    def once(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return once


def _make_shapes_once() -> None:
    """Let tensors of one shape share it; each would make it anew, with the types of its numbers."""
    from triton.language import core

    known = dict[tuple[int, ...], tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        numbers = tuple(type.shape) if type.is_block() else ()
        if numbers not in known:
            known[numbers] = (
                core.tuple([core.constexpr(number) for number in numbers]),
                core.constexpr(math.prod(numbers)),
            )
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[numbers]

    core.tensor.__init__ = init


def _dot(builder: Any, a: Any, b: Any, sums: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """`tl.dot` by definition: every element adds up its products in the order of k, and rounds after each step."""
    columns = np.moveaxis(_numbers(builder, a), -1, 0).astype(sums.data.dtype)
    rows = np.moveaxis(_numbers(builder, b), -2, 0).astype(sums.data.dtype)
    total, product = np.zeros_like(sums.data), np.empty_like(sums.data)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column[..., :, None], row[..., None, :], out=product)
        total += product
    return type(sums)(total + sums.data, sums.dtype.scalar)


def _numbers(builder: Any, factor: Any) -> np.ndarray:
    """A factor as numbers that numpy knows; it has no float8."""
    import triton.language as tl

    narrow = factor.dtype.is_floating() and factor.dtype.primitive_bitwidth == 8
    return (builder.create_fp_to_fp(factor, tl.float16, None) if narrow else factor).data


def use_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table of ops choose, for tensors on the CPU, what it chooses on a GPU."""
    from quire.kernels import cpu, ops, triton

    monkeypatch.setattr(triton, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(cpu, "supports", lambda dtype: False)
    for op in ops.TABLE.values():
        monkeypatch.setattr(op, "_functions", {})


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table choose the oracle of every op."""
    from quire.kernels import triton

    use_gpu_kernels(monkeypatch)
    monkeypatch.setattr(triton, "DEVICE_TYPES", ())
