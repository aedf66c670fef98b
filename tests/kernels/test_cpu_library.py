# SPDX-License-Identifier: Apache-2.0
"""The C++ library in a process: no OpenMP, honest errors, the same bits in any company."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError, StartupError
from quire.kernels import ops
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.cpu.signatures import SIGNATURES
from tests.fixtures.folded import folded
from tests.kernels.op_cases import compare

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import attention, elementwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_no_openmp_runtime_is_needed() -> None:
    """Two in a process disturb each other, and torch brings one."""
    library_bytes = library.PATH.read_bytes()
    assert not any(name in library_bytes for name in (b"libgomp", b"libomp", b"libiomp"))


def test_shared_code_carries_no_raised_instructions_to_share() -> None:
    """A weak symbol in the library could be an inline function that the linker kept from the AVX2 objects."""
    try:
        listing = subprocess.run(
            ["nm", "--defined-only", library.PATH], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("nm is not installed")
    symbols = [line.split()[-2:] for line in listing.stdout.splitlines()]
    assert [name for kind, name in symbols if kind in ("W", "V", "u", "i")] == []


def test_portable_kernels_can_be_selected() -> None:
    code = (
        "import torch; from quire.kernels import ops; from quire.kernels.cpu import library\n"
        "x = torch.randn(3, 77, dtype=torch.float16); w = torch.randn(77)\n"
        "assert torch.allclose(ops.rms_norm(x, w, 1e-5), ops.rms_norm.oracle(x, w, 1e-5), rtol=1e-3, atol=1e-5)\n"
        "print(library.status())"
    )
    result = run_python(code, QUIRE_CPU_ISA="portable")
    assert result.stdout.strip() == "C++ kernels for portable (QUIRE_CPU_ISA=portable)", result.stderr


@pytest.mark.more
@pytest.mark.parametrize("name", [name for name in SIGNATURES if name in ops.TABLE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", library.supported_isas()[1:])
def test_kernels_of_every_other_instruction_set_match_the_oracle(
    isa: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the best one are what test_ops.py takes."""
    opened = library.open_library(library.PATH, isa)
    monkeypatch.setattr(library, "loaded", lambda: opened)
    (row,) = (row for row in ops.TABLE[name].implementations if row.name == "cpu")
    compare(ops.TABLE[name], row.load(), dtype, "cpu", row.accepts)


DEBUG = """
import torch
from quire.kernels import ops
from quire.kernels.cpu import calls
from tests.kernels.op_cases import compare
for dtype in (torch.float32, torch.int64, torch.int8, torch.uint8, torch.bool):
    poisoned = calls.empty(torch.empty(0), 3, dtype=dtype)
    assert poisoned.isnan().all() if dtype.is_floating_point else (poisoned == poisoned[0]).all() and poisoned[0] != 0
for op in ops.TABLE.values():
    for row in (row for row in op.implementations if row.name == "cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            compare(op, row.load(), dtype, "cpu", row.accepts)
print("all written")
"""


@pytest.mark.more
def test_debug_mode_nan_outputs_have_every_element_written() -> None:
    result = run_python(DEBUG, QUIRE_DEBUG_KERNELS="1", PYTHONPATH=str(Path(__file__).parents[2]))
    assert result.stdout.strip() == "all written", result.stderr


def test_debug_mode_is_on_or_off() -> None:
    result = run_python("from quire.kernels.cpu import calls", QUIRE_DEBUG_KERNELS="yes")
    assert "QUIRE_DEBUG_KERNELS is 'yes'; it must be '0' or '1'" in result.stderr


def test_unknown_instruction_set_error_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"QUIRE_CPU_ISA is 'avx9'; this build on this CPU supports: auto, .*portable"
    ):
        library.open_library(library.PATH, "avx9")


def test_another_abi_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    with pytest.raises(StartupError, match=r"has ABI version .*reinstall"):
        library.open_library(library.PATH, "auto")


def test_another_layout_of_packed_weights_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "WEIGHT_LAYOUT", "panels-1")
    with pytest.raises(StartupError, match=r"packs weights as panels-\d+, quire as panels-1: reinstall"):
        library.open_library(library.PATH, "auto")


@pytest.mark.parametrize("numbers", ["qqqqqqdq", "qqqqqdq", "qqqqqdqqq", "qqqqqqqq"])
def test_a_kernel_with_other_arguments_is_an_error(numbers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number more, one fewer, two that changed places: each would make C++ read the wrong bytes."""
    tensors, taken = SIGNATURES["rms_norm"]
    monkeypatch.setattr(library, "SIGNATURES", SIGNATURES | {"rms_norm": (tensors, numbers)})
    message = f"'rms_norm' takes PPP{taken}, quire passes PPP{numbers}: reinstall"
    with pytest.raises(StartupError, match=message):
        library.open_library(library.PATH, "portable")


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "libquire_cpu.so").write_text("no library")
    with pytest.raises(StartupError, match=r"cannot be loaded: .*reinstall"):
        library.open_library(tmp_path / "libquire_cpu.so", "auto")


def test_missing_library_falls_back_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "libquire_cpu.so")
    library.loaded.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            rows = ops.describe("cpu", torch.float32)
        assert rows[0].implementations == ("reference",)
        assert "was not built" in rows[0].reason
        assert len([record for record in caplog.records if "was not built" in record.message]) == 1
    finally:
        library.loaded.cache_clear()


def rotated(x: Tensor) -> Tensor:
    """Rows of x as the query heads of tokens, all at one position."""
    heads = x.clone().unsqueeze(1)
    cache = torch.randn(1, x.shape[1] // 2 * 2, generator=torch.Generator().manual_seed(0))
    return attention.rotary_embedding(torch.zeros(len(x), dtype=torch.int64), heads, heads[:, :0], cache)[
        0
    ].squeeze(1)


def fused(x: Tensor) -> Tensor:
    return torch.cat(
        elementwise.fused_add_rms_norm(x, x.flip(-1), torch.linspace(-1, 1, x.shape[-1]), 1e-5), -1
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: elementwise.rms_norm(x, torch.linspace(-1, 1, x.shape[-1]), 1e-5),
        fused,
        elementwise.silu_and_mul,
        rotated,
    ],
    ids=["rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"],
)
def test_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, restore_threads: None
) -> None:
    x = torch.randn(150, 1030).to(dtype)  # enough elements for a parallel loop, and a tail in every row
    assert x.numel() >= 2 * (1 << 16)
    set_num_threads(1)
    alone = torch.cat([function(row) for row in x.split(1)])
    for threads in (1, 2, 3):
        set_num_threads(threads)
        assert torch.equal(function(x), alone)
        assert torch.equal(function(x[7:]), alone[7:])


def test_a_strided_view_has_the_same_bits_as_its_copy() -> None:
    view = torch.randn(5, 300)[:, 30:180].view(5, 3, 50)
    weight = torch.randn(50)
    assert torch.equal(
        elementwise.rms_norm(view, weight, 1e-6), elementwise.rms_norm(view.contiguous(), weight, 1e-6)
    )


@folded(
    ("call", "error", "message"),
    [
        (
            lambda: elementwise.rms_norm(torch.ones(2, 4).double(), torch.ones(4), 1e-5),
            TypeError,
            "x must be float32",
        ),
        (
            lambda: elementwise.rms_norm(torch.ones(2, 4), torch.ones(5), 1e-5),
            ValueError,
            r"weight .* shape \[4\]",
        ),
        (lambda: elementwise.rms_norm(torch.ones(2, 4), torch.ones(4).half(), 1e-5), TypeError, "or float32"),
        (
            lambda: elementwise.rms_norm(torch.ones(2, 4, device="meta"), torch.ones(4), 1e-5),
            ValueError,
            "x must be on the CPU",
        ),
        (
            lambda: elementwise.fused_add_rms_norm(torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), 1e-5),
            ValueError,
            "residual is",
        ),
        (lambda: elementwise.silu_and_mul(torch.ones(2, 5)), ValueError, "must be even"),
        (lambda: elementwise.activate(torch.ones(2), "elu"), ValueError, "one of relu, .* it is 'elu'"),  # type: ignore[arg-type]
        (lambda: rotary(positions=torch.zeros(2)), ValueError, "positions must be contiguous int64"),
        (
            lambda: rotary(positions=torch.tensor([0, 9])),
            IndexError,
            "1 positions are outside the cache of 9",
        ),
        (lambda: rotary(positions=torch.tensor([0, -1])), IndexError, "outside the cache"),
        (lambda: rotary(k=torch.ones(3, 1, 8)), ValueError, r"k must be \[2, heads, >= 8\]"),
        (lambda: rotary(q=torch.ones(2, 1, 6)), ValueError, "q must be"),
        (lambda: rotary(k=torch.ones(2, 1, 8).half()), ValueError, "k must be torch.float32"),
        (lambda: rotary(cache=torch.ones(9, 8).half()), ValueError, "cos_sin_cache must be float32"),
    ],
)
def test_wrong_arguments_are_clear_errors(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def rotary(**changed: Tensor) -> None:
    good = {
        "positions": torch.zeros(2, dtype=torch.int64),
        "q": torch.ones(2, 3, 8),
        "k": torch.ones(2, 1, 8),
        "cache": torch.ones(9, 8),
    }
    attention.rotary_embedding(*(good | changed).values())
