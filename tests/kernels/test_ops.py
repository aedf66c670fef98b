# SPDX-License-Identifier: Apache-2.0
"""Every implementation in the table of ops against its oracle; a new row is tested without a new test."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import ops
from tests.fixtures.folded import folded
from tests.kernels.op_cases import CASES, compare

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(ops.TABLE)


def test_every_op_is_documented() -> None:
    assert [name for name, row in ops.TABLE.items() if not row.__doc__] == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(ops.TABLE))
def test_op_matches_its_oracle(name: str, dtype: torch.dtype, device: str) -> None:
    """The selected implementation of an op matches its oracle, and then each of the other implementations, if any.

    Without a GPU, test_triton.py runs those for GPUs interpreted.
    """
    op = ops.TABLE[name]
    compare(op, op, dtype, device)
    for row in op.supporting(device, dtype)[1:]:
        compare(op, row.load(), dtype, device, row.accepts)


@folded(
    ("name", "row"),
    [(name, row) for name, op in ops.TABLE.items() for row in op.implementations if row.name == "cpu"],
)
def test_implementation_takes_the_same_parameters(name: str, row: ops.Implementation) -> None:
    def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(row.load()) == parameters(ops.TABLE[name].oracle)


def test_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    ops.reference_only.cache_clear()
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    try:
        assert {row.implementations for row in ops.describe()} == {("reference",)}
        monkeypatch.setenv("QUIRE_KERNELS", "fast")
        ops.reference_only.cache_clear()
        with pytest.raises(ConfigError, match="'fast'; it must be 'auto' or 'reference'"):
            ops.describe()
    finally:
        ops.reference_only.cache_clear()


def test_describe_gives_a_reason_for_every_op() -> None:
    rows = ops.describe("cpu", torch.float32)
    assert [row.op for row in rows] == list(ops.TABLE)
    assert all(row.reason and row.implementations[-1] == "reference" for row in rows)


def test_the_first_implementation_that_accepts_is_called() -> None:
    def row(name: str, accepts: Callable[..., bool] | None = None) -> ops.Implementation:
        return ops.Implementation(
            name, lambda: lambda x: name, lambda device, dtype: device == "cpu", lambda: "", accepts
        )

    def oracle(x: Tensor) -> str:
        return "reference"

    op = ops.Op(oracle, (row("small", lambda x: x.shape[0] < 2), row("rest")), key=0)
    assert (op(torch.zeros(1)), op(torch.zeros(3)), op(torch.zeros(1, device="meta"))) == (
        "small",
        "rest",
        "reference",
    )
