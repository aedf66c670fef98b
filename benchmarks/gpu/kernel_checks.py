# SPDX-License-Identifier: Apache-2.0
"""Checks of single kernels, compiled for the device, against the oracle: real shapes, and the tests' small cases.

Invariant: an oracle computes on the same device in float32, so an error is the kernel's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import GEMMA_2B, LLAMA_8B, QWEN_05B, TINY, TINY_WINDOW, Shape
from benchmarks.gpu.target import Target
from quire.kernels import ops
from quire.kernels.triton.quantize import quantize_rows
from tests.kernels.op_cases import CASES, compare

LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error allowed, as a share of the oracle's largest number."""
E4M3_LIMITS = {True: 0.08, False: 0.6}
"""The same for numbers in E4M3, by whether the target is a GPU: their largest step is 32 of 448, and a last bit may
decide on which side one falls. Triton's interpreter drops the carry of some, and so halves them."""
_FAST_TO_INTERPRET = ("write_kv", "embedding", "penalize_rows")


def checks(target: Target) -> Iterator[Check]:
    """Real shapes of everything but attention, linears and sampling, which have files of their own."""
    for shape in (TINY,) if target.tiny else (LLAMA_8B, QWEN_05B, GEMMA_2B):
        dtypes = target.dtypes if shape in (TINY, LLAMA_8B) else (target.main_dtype,)
        for dtype in dtypes:
            yield from _rowwise(target, shape, dtype)


def name_of(shape: Shape, what: str, dtype: torch.dtype) -> str:
    """Return the name of a check."""
    return f"{shape.name}: {what}, {str(dtype).removeprefix('torch.')}"


def triton_function(name: str) -> Callable[..., Any]:
    """The GPU's implementation of an op."""
    return next(row for row in ops.TABLE[name].implementations if row.name == "triton").load()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference as a share of the largest number wanted; infinite where only one of them is finite."""
    got, want = got.double(), want.double()
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    got, want = got.nan_to_num(0.0, 0.0, 0.0), want.nan_to_num(0.0, 0.0, 0.0)
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() if got.numel() else 0.0


def differs(got: Tensor, want: Tensor) -> float:
    """Number of elements whose bits differ."""
    return float((got != want).sum())


def randn(target: Target, *shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers made on the device."""
    generator = torch.Generator(target.device).manual_seed(seed)
    return torch.randn(*shape, device=target.device, dtype=torch.float32, generator=generator).to(dtype)


def small_cases(target: Target) -> Iterator[Check]:
    """The cases of the tests, in which all branches are taken; there are many kernels to compile."""
    for name, op in ops.TABLE.items():
        rows = [row for row in op.implementations if row.name == "triton"]
        if not rows or (target.tiny and name not in _FAST_TO_INTERPRET) or name not in CASES:
            continue
        for dtype in target.dtypes[:2]:
            run = partial(_compare, target, name, dtype)
            yield Check(f"the tests' cases: {name}, {str(dtype).removeprefix('torch.')}", run)


def _compare(target: Target, name: str, dtype: torch.dtype) -> float:
    row = next(row for row in ops.TABLE[name].implementations if row.name == "triton")
    compare(ops.TABLE[name], row.load(), dtype, target.device.type, row.accepts)
    return 0.0


def _rowwise(target: Target, shape: Shape, dtype: torch.dtype) -> Iterator[Check]:
    tokens = 5 if target.tiny else 2049
    make = partial(randn, target, dtype=dtype)
    x, residual = partial(make, tokens, shape.hidden), partial(make, tokens, shape.hidden, seed=1)
    weight, gated = partial(make, shape.hidden, seed=2), partial(make, tokens, 2 * shape.intermediate)
    table = partial(make, shape.vocab, shape.hidden)
    ids = partial(torch.randint, 0, shape.vocab, (tokens,), device=target.device)
    calls: dict[str, Callable[[], tuple[Any, ...]]] = {
        "rms_norm": lambda: (x(), weight(), 1e-6),
        "fused_add_rms_norm": lambda: (x(), residual(), weight(), 1e-6),
        "layer_norm": lambda: (x(), weight(), residual()[0], 1e-5),
        "fused_add_layer_norm": lambda: (x(), residual(), weight(), residual()[0], 1e-5),
        "activate": lambda: (gated(), "relu"),
        "silu_and_mul": lambda: (gated(),),
        "gelu_and_mul": lambda: (gated(), "tanh"),
        "embedding": lambda: (ids(), table()),
    }
    for name, make_args in calls.items():
        yield Check(name_of(shape, name, dtype), partial(_against_oracle, name, make_args), LIMITS[dtype])
    quantizing = {f"{name}_fp8": make_args for name, make_args in calls.items() if f"{name}_fp8" in ops.TABLE}
    for name, make_args in quantizing.items():
        yield Check(
            name_of(shape, name, dtype), partial(_against_oracle, name, make_args), E4M3_LIMITS[target.is_gpu]
        )
        run = partial(_against_two_passes, name, make_args)
        yield Check(name_of(shape, f"{name}, share of codes other than in two passes", dtype), run, 1e-3)
    for what, has_norms in (("rotary_and_write_kv", False), ("rotary_and_write_kv, norms", True)):
        run = partial(_rotary, target, shape, dtype, has_norms)
        yield Check(name_of(shape, what, dtype), run, LIMITS[dtype])


def _against_oracle(name: str, make_args: Callable[[], tuple[Any, ...]]) -> float:
    args = make_args()
    got, want = triton_function(name)(*args), ops.TABLE[name].oracle(*args)
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    # What a quantized row stands for is compared in float32.
    return max(relative_error(ours.float(), theirs.float()) for ours, theirs in pairs)


def _against_two_passes(name: str, make_args: Callable[[], tuple[Any, ...]]) -> float:
    """Return the share of a kernel's quantized values that differ from those of a separate quantization pass."""
    args = make_args()
    got = triton_function(name)(*args)
    plain = triton_function(name.removesuffix("_fp8"))(*args)
    rows, plain = (part[0] if isinstance(part, tuple) else part for part in (got, plain))
    codes = (part.values.view(torch.uint8) for part in (rows, quantize_rows(plain)))
    return differs(*codes) / rows.values.numel()


def _rotary(target: Target, shape: Shape, dtype: torch.dtype, has_norms: bool) -> float:
    """Queries, keys and both caches, from views of one fused projection."""
    tokens, block_size, num_blocks = (6, 4, 8) if target.tiny else (1001, 16, 100)
    sizes = [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    fused = randn(target, tokens, shape.qkv, dtype=dtype)
    table = torch.rand(4096, shape.head_size, device=target.device)
    positions = torch.randint(0, 4096, (tokens,), device=target.device)
    slots = torch.randperm(num_blocks * block_size, device=target.device)[:tokens]
    slots[::7] = -1
    norms = randn(target, 2, shape.head_size, dtype=dtype, seed=3)
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-6} if has_norms else {}
    results = []
    for function in (triton_function("rotary_and_write_kv"), ops.rotary_and_write_kv.oracle):
        views = [part.unflatten(1, (-1, shape.head_size)) for part in fused.clone().split(sizes, 1)]
        caches = empty_caches(target, shape, num_blocks, block_size, dtype)
        function(positions, *views, table, *caches, slots, **options)
        results.append([*views, *caches])
    return max(relative_error(ours, theirs) for ours, theirs in zip(*results, strict=True))


def empty_caches(
    target: Target, shape: Shape, num_blocks: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys, a transposed view as a GPU keeps them, and values; zeros."""
    sizes = (num_blocks, shape.kv_heads, block_size, shape.head_size)
    keys, values = (torch.zeros(sizes, device=target.device).to(dtype) for _ in range(2))
    return keys.transpose(2, 3), values


WINDOWED = {False: GEMMA_2B, True: TINY_WINDOW}
"""The shape with a window and a soft cap, by whether the target is tiny."""
