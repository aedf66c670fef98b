# SPDX-License-Identifier: Apache-2.0
"""Sampling as functions on tensors, with all checks."""

import torch
from torch import Tensor

from quire.kernels.attention_metadata import ANY_LIMITS, SamplingLimits
from quire.kernels.cpu.calls import call, check_array, check_index, describe, empty

# Token ids are 32-bit inside the kernels, with room for a vector past the last one.
_MAX_VOCAB_SIZE = 2**31 - 16


class UnusableLogitsError(ArithmeticError):
    """Raised if no token can be sampled from the logits."""


def unusable_rows(logits: Tensor) -> Tensor:
    return _unusable_rows(logits)[0]


def require_usable(logits: Tensor) -> None:
    """Check that `ops.unusable_rows` finds none; a replayed graph stops here otherwise.

    Raises:
        UnusableLogitsError: it finds some.
    """
    unusable, count = _unusable_rows(logits)
    if count:
        raise UnusableLogitsError(f"{count} of {len(unusable)} rows of logits are not finite")


def _unusable_rows(logits: Tensor) -> tuple[Tensor, int]:
    """Return the unusable rows [N] bool, and their number."""
    rows, vocab_size = _check_logits("unusable_rows", logits)
    out = empty(logits, rows, dtype=torch.bool)
    return out, call("unusable_rows", (out, logits), rows, vocab_size)


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    op = "mask_logits"
    num_rows, vocab_size = _check_logits(op, logits)
    count = rows.shape[0] if rows.dim() else 0
    check_index(op, "rows", rows, count)
    check_array(op, "words", words, torch.int32, (count, -(-vocab_size // 32)))
    refused = call(op, (logits, rows, words), count, num_rows, vocab_size)
    if refused:
        raise IndexError(f"{op}: {refused} of {rows.tolist()} are no rows of {num_rows}")


def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    op = "apply_penalties"
    _check_logits(op, logits)
    count = indices.shape[0] if indices.dim() else 0
    check_index(op, "indices", indices, count)
    check_array(op, "repetition", repetition, torch.float64, (count,))
    check_array(op, "subtracted", subtracted, torch.float64, (count,))
    refused = call(op, (logits, indices, repetition, subtracted), count, logits.numel())
    if refused:
        raise IndexError(f"{op}: {refused} indices are outside the {logits.numel()} logits")


def sample_tokens(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: SamplingLimits = ANY_LIMITS
) -> Tensor:
    """Sample by inverse transform; the kernel determines each row's limits itself."""
    numbers = settings.new_zeros(len(settings)) if keys is None else uniforms(keys)
    return sample_by_inversion(logits, settings, numbers)


def uniforms(keys: Tensor) -> Tensor:
    """Return `philox.uniform` of seeds and positions [N, 2]."""
    count = keys.shape[0] if keys.dim() else 0
    check_array("sample_tokens", "keys", keys, torch.int64, (count, 2))
    return uniforms_at(*keys.t().contiguous())


def uniforms_at(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the same for seeds [N] and positions [N], contiguous int64."""
    count = len(seeds)
    check_array("philox_uniform", "seeds", seeds, torch.int64, (count,))
    check_array("philox_uniform", "positions", positions, torch.int64, (count,))
    out = empty(seeds, count, dtype=torch.float64)
    call("philox_uniform", (out, seeds, positions), count)
    return out


def sample_by_inversion(logits: Tensor, settings: Tensor, numbers: Tensor) -> Tensor:
    """Return `sample_tokens` from numbers [N] float64 in [0, 1)."""
    op = "sample_tokens"
    rows, vocab_size = _check_logits(op, logits)
    check_array(op, "settings", settings, torch.float64, (rows, 4))
    check_array(op, "numbers", numbers, torch.float64, (rows,))
    out = empty(logits, rows, dtype=torch.int64)
    refused = call(op, (out, logits, settings, numbers), rows, vocab_size)
    if refused:
        raise ValueError(f"{op}: {refused} rows of settings have a temperature below 0 or a top_k below 1")
    return out


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    op = "token_logprobs"
    rows, vocab_size = _check_logits(op, logits)
    check_index(op, "chosen", chosen, rows)
    if not 0 <= num_top <= vocab_size:
        raise ValueError(f"{op}: num_top must be in [0, {vocab_size}]; it is {num_top}")
    ids = empty(chosen, rows, 1 + num_top)
    logprobs = empty(logits, rows, 1 + num_top)
    ranks = empty(chosen, rows)
    refused = call(op, (ids, logprobs, ranks, logits, chosen), rows, vocab_size, num_top)
    if refused:
        raise IndexError(f"{op}: {refused} chosen tokens are outside the vocabulary of {vocab_size}")
    return ids, logprobs, ranks


def _check_logits(op: str, logits: Tensor) -> tuple[int, int]:
    """Return (rows, vocabulary)."""
    if logits.dtype is not torch.float32 or not logits.is_cpu:
        raise TypeError(
            f"{op}: logits must be float32 on the CPU; they are {describe(logits)} on {logits.device}"
        )
    shape = logits.shape
    if len(shape) != 2 or not logits.is_contiguous() or not 0 < shape[1] < _MAX_VOCAB_SIZE:
        raise ValueError(f"{op}: logits must be contiguous [N, V], V > 0; they are {describe(logits)}")
    return shape[0], shape[1]
