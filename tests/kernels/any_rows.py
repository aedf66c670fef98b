# SPDX-License-Identifier: Apache-2.0
"""Products of every weight format, shown not to depend on the rows, in a process with one instruction set.

`python -m tests.kernels.any_rows` writes the sums to its output: what `products_by` reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels import ops
from quire.kernels.linear import PackedWeight, WeightScheme
from tests.kernels.op_cases import SCHEMES

ROWS, OUTPUTS, INPUTS = 40, 40, 140
TINY = 2.0**-64
"""Products of numbers that are smaller by this are below the normal ones, which some instructions count as 0."""


def formats() -> list[tuple[WeightScheme, torch.dtype]]:
    """Every scheme, and floats of every dtype."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return [
        (scheme, dtype)
        for scheme in SCHEMES
        for dtype in (floats if scheme.kind == "float" else (torch.float32,))
    ]


def operands() -> tuple[Tensor, Tensor]:
    """Rows [40, 140], and weights [40, 140], which are the same numbers on every machine, as normal ones are not."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-999, 1000, (size, INPUTS), generator=generator) for size in (ROWS, OUTPUTS))
    return x / 300, w / 5000


def products_by(isa: str, **environment: str) -> dict[tuple[WeightScheme, torch.dtype], Tensor]:
    """The sums of every format with one instruction set."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.any_rows"],
        env={"PATH": os.environ["PATH"], "QUIRE_CPU_ISA": isa, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
        | environment,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    sums = torch.frombuffer(bytearray(result.stdout), dtype=torch.float32).view(-1, ROWS, OUTPUTS)
    return dict(zip(formats(), sums, strict=True))


def _products() -> Iterator[Tensor]:
    x, w = operands()
    for scheme, dtype in formats():
        packed = ops.pack_weight(w.to(dtype), scheme)
        alone = _alone(x, packed)
        torch.testing.assert_close(alone, ops.packed_linear.oracle(x, packed), rtol=1e-5, atol=1e-5)
        if scheme.kind == "float" and dtype is not torch.float16:
            _alone(x * TINY, ops.pack_weight((w * TINY).to(dtype), scheme))
        yield alone


def _alone(x: Tensor, packed: PackedWeight) -> Tensor:
    """Products of each row alone, which it has beside others, too."""
    alone = torch.cat([ops.packed_linear(row, packed) for row in x.split(1)])
    for rows in (2, 3, 4, 5, 7, 13, 17, 24, 40):
        assert torch.equal(ops.packed_linear(x[:rows], packed), alone[:rows]), (packed.scheme, rows)
    return alone


if __name__ == "__main__":
    sys.stdout.buffer.write(torch.stack(list(_products())).numpy().tobytes())
