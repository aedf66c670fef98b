# SPDX-License-Identifier: Apache-2.0
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
from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS
from quire.kernels.reference_sampling import sample_by_gumbel
from tests.kernels.op_cases import random_keys, settings


def checks(target: Target) -> Iterator[Check]:
    """Every op of the tail, for the vocabularies of the shapes."""
    shapes = (TINY,) if target.tiny else (LLAMA_8B, QWEN_05B, GEMMA_2B)
    for vocab in sorted({shape.vocab for shape in shapes}):
        # One row in 32 may be where rounding decides on which side of a boundary a number falls.
        yield Check(f"V = {vocab}: sampled tokens", partial(_tokens, target, vocab), 1.0)
        yield Check(f"V = {vocab}: the same tokens in any number of splits", partial(_splits, target, vocab))
        # The 0.1 % point of chi-square with 64 degrees of freedom is 1.63 for each.
        yield Check(
            f"V = {vocab}: draws are fair", partial(_fair, target, vocab), 4.0 if target.tiny else 1.63
        )
        yield Check(f"V = {vocab}: logprobs", partial(_logprobs, target, vocab), 1e-5)
        yield Check(f"V = {vocab}: rows that no token can be chosen from", partial(_unusable, target, vocab))
        yield Check(f"V = {vocab}: a row's bits in any batch", partial(_alone, target, vocab))


def _rows(target: Target) -> int:
    return 4 if target.tiny else 32


def _inputs(target: Target, vocab: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    rows = _rows(target)
    logits = 3 * randn(target, rows, vocab, dtype=torch.float32)
    return logits, *(part.to(target.device) for part in (settings(rows, vocab), random_keys(rows)))


def _tokens(target: Target, vocab: int) -> float:
    inputs = _inputs(target, vocab)
    return differs(triton_function("sample_tokens")(*inputs), sample_by_gumbel(*inputs))


def _splits(target: Target, vocab: int) -> float:
    """In one part, and in as many as there can be."""
    from quire.kernels.triton.sampling import sample_in_splits

    inputs = _inputs(target, vocab)
    runs = [sample_in_splits(*inputs, ANY_LIMITS, count) for count in (1, 1 << 20)]
    return differs(*runs)


def _fair(target: Target, vocab: int) -> float:
    """Chi-square of draws by many seeds, per degree of freedom, where the likeliest 64 tokens have most of the mass."""
    num_draws, num_bins = (60, 4) if target.tiny else (8192, 65)
    logits = torch.full((vocab,), -9.0, device=target.device)
    logits[:: vocab // num_bins] = torch.linspace(
        0, 3, len(logits[:: vocab // num_bins]), device=target.device
    )
    probabilities = logits.double().softmax(0)
    likely = probabilities.topk(num_bins - 1).indices
    expected = num_draws * torch.cat([probabilities[likely], 1 - probabilities[likely].sum(0, keepdim=True)])
    plain = torch.tensor([(1.0, -torch.inf, vocab, 1.0)], dtype=torch.float64, device=target.device)
    counts = torch.zeros(vocab, dtype=torch.float64, device=target.device)
    for part in torch.arange(num_draws, device=target.device).split(256):
        rows, keys = len(part), torch.stack([part, torch.full_like(part, 3)], dim=1)
        drawn = triton_function("sample_tokens")(
            logits.repeat(rows, 1), plain.repeat(rows, 1), keys, NO_LIMITS
        )
        counts += torch.bincount(drawn, minlength=vocab)
    found = torch.cat([counts[likely], num_draws - counts[likely].sum(0, keepdim=True)])
    return float(((found - expected) ** 2 / expected).sum()) / (num_bins - 1)


def _logprobs(target: Target, vocab: int) -> float:
    logits, *_ = _inputs(target, vocab)
    chosen = torch.randint(0, vocab, (len(logits),), device=target.device)
    ids, logprobs, ranks = triton_function("token_logprobs")(logits, chosen, 5)
    want = ops.token_logprobs.oracle(logits, chosen, 5)
    if differs(ids, want[0]) or differs(ranks, want[2]):
        return float("inf")
    return relative_error(logprobs, want[1])


def _unusable(target: Target, vocab: int) -> float:
    logits, *_ = _inputs(target, vocab)
    logits[0, vocab - 1], logits[1, 0], logits[2] = torch.nan, -torch.inf, -torch.inf
    return differs(triton_function("unusable_rows")(logits), ops.unusable_rows.oracle(logits))


def _alone(target: Target, vocab: int) -> float:
    """Tokens and logprobs."""
    inputs = _inputs(target, vocab)
    sample, logprobs = triton_function("sample_tokens"), triton_function("token_logprobs")
    chosen = torch.zeros(len(inputs[0]), dtype=torch.int64, device=target.device)

    def results(rows: slice) -> Tensor:
        part = [tensor[rows] for tensor in inputs]
        return torch.cat([sample(*part)[:, None], logprobs(part[0], chosen[rows], 2)[1]], dim=1)

    alone = [results(slice(row, row + 1)) for row in range(3)]
    return differs(torch.cat(alone), results(slice(None))[:3])
