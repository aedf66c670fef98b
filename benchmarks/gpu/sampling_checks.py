"""Checks of the sampling tail at real vocabulary sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.kernel_checks import differs, randn, relative_error, triton_function
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import GEMMA_2B, LLAMA_8B, QWEN_05B, TINY
from benchmarks.gpu.target import Target
from quire.kernels import ops
from tests.kernels.op_cases import settings, uniforms


def checks(target: Target) -> Iterator[Check]:
    """Every op of the tail, for the vocabularies of the shapes."""
    shapes = (TINY,) if target.tiny else (LLAMA_8B, QWEN_05B, GEMMA_2B)
    for vocab in sorted({shape.vocab for shape in shapes}):
        # One row in 64 may be where rounding decides on which side of a boundary a number falls.
        yield Check(f"V = {vocab}: sampled tokens", partial(_tokens, target, vocab), 1.0)
        yield Check(f"V = {vocab}: logprobs", partial(_logprobs, target, vocab), 1e-5)
        yield Check(f"V = {vocab}: rows that are not finite", partial(_non_finite, target, vocab))
        yield Check(f"V = {vocab}: a row's bits in any batch", partial(_alone, target, vocab))


def _rows(target: Target) -> int:
    return 4 if target.tiny else 64


def _inputs(target: Target, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    rows = _rows(target)
    logits = 3 * randn(target, rows, vocab, dtype=torch.float32)
    return logits, settings(rows, vocab).to(target.device), uniforms(rows).to(target.device)


def _tokens(target: Target, vocab: int) -> float:
    logits, wanted, uniform = _inputs(target, vocab)
    ours = triton_function("sample_tokens")(logits, wanted, uniform)
    return differs(ours, ops.sample_tokens.oracle(logits, wanted, uniform))


def _logprobs(target: Target, vocab: int) -> float:
    logits, _, _ = _inputs(target, vocab)
    chosen = torch.randint(0, vocab, (len(logits),), device=target.device)
    ids, logprobs, ranks = triton_function("token_logprobs")(logits, chosen, 5)
    want = ops.token_logprobs.oracle(logits, chosen, 5)
    if differs(ids, want[0]) or differs(ranks, want[2]):
        return float("inf")
    return relative_error(logprobs, want[1])


def _non_finite(target: Target, vocab: int) -> float:
    logits, _, _ = _inputs(target, vocab)
    logits[0, vocab - 1], logits[2, 0] = torch.nan, -torch.inf
    return differs(triton_function("non_finite_rows")(logits), ops.non_finite_rows.oracle(logits))


def _alone(target: Target, vocab: int) -> float:
    logits, wanted, uniform = _inputs(target, vocab)
    sample = triton_function("sample_tokens")
    whole = sample(logits, wanted, uniform)
    alone = [sample(logits[i : i + 1], wanted[i : i + 1], uniform[i : i + 1]) for i in range(3)]
    return differs(torch.cat(alone), whole[:3])
