# SPDX-License-Identifier: Apache-2.0
"""Instruction sets: the same bits on all that this processor has, and on those that an emulator stands in for."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu import library
from tests.kernels.any_rows import formats, operands, products_by

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

SUPPORTED = library.supported_isas()
FUSING = [isa for isa in SUPPORTED if isa != "portable"]
ROUNDED = next(
    one for one in formats() if one[0].kind == "float" and one[0].fast and one[1] is torch.bfloat16
)
"""The format of `--matmul-precision medium`, which AMX alone adds in another order."""


def bits(isa: str, **environment: str) -> dict[object, bytes]:
    products = products_by(isa, **environment)
    if isa == "amx":
        del products[ROUNDED]
    return {key: sums.numpy().tobytes() for key, sums in products.items()}


@pytest.mark.more
def test_portable_products_do_not_depend_on_the_rows() -> None:
    products_by("portable")


@pytest.mark.more
def test_fma_instruction_sets_have_the_same_bits_for_any_rows() -> None:
    all_bits = [bits(isa) for isa in FUSING]
    for other in all_bits:
        assert other == {key: all_bits[-1][key] for key in other}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """To be preloaded; it executes the instructions of kernels as they were compiled."""
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("it takes a C++ compiler and an x86-64 processor")
    path = tmp_path_factory.mktemp("emulator") / "libemulator.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off"]
    subprocess.run(
        [compiler, *options, str(Path(__file__).with_name("emulator.cpp")), "-o", str(path)], check=True
    )
    return str(path)


@pytest.mark.more
@pytest.mark.parametrize(("isa", "base"), [("avxvnni", "avx2"), ("amx", "avx512bf16")])
def test_emulated_instruction_set_has_the_bits_of_its_base(isa: str, base: str, emulator: str) -> None:
    if base not in SUPPORTED:
        pytest.skip(f"all but a few of its instructions are those of {base}")
    emulated = bits(isa, LD_PRELOAD=emulator, QUIRE_EMULATE=isa)
    expected = bits(base)
    assert emulated == {key: expected[key] for key in emulated}


def by_tiles(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [N, K], both bfloat16, as AMX adds them: a product of two bfloat16 is exact in float32."""
    x, w = x.float(), w.float()
    total = torch.zeros(len(x), len(w))
    for start in range(0, x.shape[1], 32):
        sums = torch.zeros(2, *total.shape)
        for k in range(start, min(start + 32, x.shape[1])):
            sums[k % 2] += x[:, k, None] * w[None, :, k]
        total += sums[0] + sums[1]
    return total


@pytest.mark.more
def test_tiles_of_bfloat16_are_added_as_is_documented(emulator: str) -> None:
    if "avx512bf16" not in SUPPORTED:
        pytest.skip("all but a few of its instructions are those of avx512bf16")
    x, w = (operand.bfloat16() for operand in operands())
    emulated = products_by("amx", LD_PRELOAD=emulator, QUIRE_EMULATE="amx")[ROUNDED]
    assert torch.equal(emulated, by_tiles(x, w))


def test_missing_requirement_of_each_instruction_set_is_named() -> None:
    loaded = library.loaded()
    assert loaded is not None
    assert [isa for isa, missing in loaded.missing.items() if missing is None] == list(SUPPORTED)
    assert all("lacks" in why or "build" in why or "system" in why for why in loaded.missing.values() if why)
    assert loaded.missing["portable"] is None
