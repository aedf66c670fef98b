# SPDX-License-Identifier: Apache-2.0
"""Oracle of the sampling ops, the order of tokens, and counter-based random numbers.

Invariant: floating-point work is row by row (softmax, cumulative sums), never an element-wise function over the whole
batch, whose vector lanes would depend on a row's place in it.

The order of tokens is total: the higher logit first and, of equal logits, the lower id first. Argmax, top-k, top-p,
ranks and logprobs all use it; no result depends on how a selection algorithm treats ties.

The n-th draw of a seed is a stateless function of (seed, n), so a request draws the same numbers alone, in any batch,
after a preemption and on any machine. Philox4x32-10 of J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011): ten rounds of multiply, exchange and xor turn a 128-bit counter and a 64-bit key
into 128 random bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.attention_metadata import ANY_LIMITS, SamplingLimits

_LOW_32 = 0xFFFFFFFF


def order_keys(logits: Tensor) -> Tensor:
    """Return integers in the order of tokens: logits [N, V] float32 without NaN -> [N, V] int64, larger is earlier.

    The upper half is the logit's bit pattern made monotonic (negative numbers have their magnitude bits flipped), the
    lower half counts ids downwards.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 equal
    monotonic = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (monotonic.long() << 32) + torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)


def ids_of(keys: Tensor, vocab_size: int) -> Tensor:
    """Return the token ids of order keys, of the same shape."""
    return vocab_size - 1 - (keys & _LOW_32)


def rank_of(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the 1-based rank of one token per row: order keys [N, V], token_ids [N] -> [N] int64."""
    return (keys > keys.gather(1, token_ids[:, None])).sum(1) + 1


_ROUNDS = 10
_PHILOX_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)  # for counter words 2 and 0
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)  # added to the two key words in each round
_BELOW_ONE = np.float32(1.0 - 2.0**-24)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Generate random words [4, N] from counter [4, N] and key [2, N], all of 32 bits."""
    keys = (key[None] + _WEYL) & _PHILOX_LOW_32
    even, odd = counter[[2, 0]], counter[[1, 3]]
    for round_key in keys:
        product = even * _MULTIPLIERS
        # Each product's high half is mixed into an odd word; its low half becomes the other pair's odd word.
        mixed = (product >> _32) ^ odd ^ round_key
        even, odd = mixed[::-1], (product & _PHILOX_LOW_32)
    return np.stack((even[1], odd[0], even[0], odd[1]))


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), both [N]; a multiple of 2**-52."""
    words = _words(seeds, positions, np.zeros(len(seeds), dtype=np.uint64))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    uniforms: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-52
    return uniforms


def fractions(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """Return numbers in (0, 1) for `count` tokens of one (seed, position), precise near 0: 64 bits each as a float32.

    Tokens 2 i and 2 i + 1 have the words of counter (position, i).
    """
    pairs = np.arange((count + 1) // 2, dtype=np.uint64)
    seeds, positions = (np.full(len(pairs), value, dtype=np.int64) for value in (seed, position))
    high, low = _words(seeds, positions, pairs).reshape(2, 2, -1).transpose(1, 2, 0).astype(np.float32)
    v = high * np.float32(2.0**-32) + (low + np.float32(0.5)) * np.float32(2.0**-64)
    return np.minimum(v, _BELOW_ONE).reshape(-1)[:count]


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Return Gumbel noise -ln(-ln(1 - v)) for `count` tokens of one (seed, position), with v of `fractions`."""
    noise: NDArray[np.float64] = -np.log(-np.log1p(-fractions(seed, position, count).astype(np.float64)))
    return noise


def _words(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], thirds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return random words [4, N] of the counters (position, third, 0)."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack((seed & _PHILOX_LOW_32, seed >> _32))
    return philox4x32(
        np.stack((position & _PHILOX_LOW_32, position >> _32, thirds, thirds * np.uint64(0))), key
    )


# Rows per slice are bounded so that the allocator recycles the float64 and int64 copies of their logits (elements, 8
# MiB each); larger ones would be fresh pages of the system every time, which costs more than the arithmetic.
_SLICE_ELEMENTS = 1 << 20
_MAX_LOGIT = torch.finfo(torch.float32).max
_SORTED_ELEMENTS = 1 << 22
"""Elements sorted at once: some 50 bytes each."""
_FIRST_WIDTH = 64
_WIDENING = 16


def unusable_rows(logits: Tensor, /) -> Tensor:
    """Return the rows that cannot be sampled: [N, V] -> [N] bool.

    They hold a NaN or +inf, or nothing but -inf; a single -inf only means that a token is impossible.
    """
    # The sum is far cheaper than testing every element. It can overflow for huge finite logits, and a token may be
    # impossible: check those rows again.
    suspects = ~logits.sum(1).isfinite()
    for row in suspects.nonzero().squeeze(1).tolist():
        suspects[row] = not logits[row].amax().isfinite()  # a maximum propagates NaN
    return suspects


def clear_rows(logits: Tensor, cleared: Tensor, /) -> None:
    """Set the rows [N, V] selected by `cleared` [N] bool to 0, in place, without a device-to-host sync on a GPU."""
    if cleared.cpu().numpy().any():  # on small tensors half the time of torch's
        logits[cleared] = 0.0


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor, /) -> None:
    """Forbid tokens in some rows, in place: logits [N, V] become -inf where a row's mask bit is 0.

    rows [U] int64, all different; words [U, ceil(V / 32)] int32: bit v % 32 of word v // 32 is token v's. No logit is
    NaN.
    """
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor, /) -> None:
    """Penalize some logits in place, in float64: x -> (x / r if x > 0 else x * r) - s, clamped to float32's maximum.

    indices [M] int64, all different, into the flattened logits; repetition r and subtracted s [M] float64. Repetition:
    N. Keskar et al., "CTRL" (2019), section 4.1. An index outside the logits is an IndexError.
    """
    flat = logits.view(-1)
    # In float64, and clamped to the range: a tiny or huge factor must not produce an infinity or a NaN.
    values = flat[indices].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = (values - subtracted).clamp_(max=_MAX_LOGIT).float()


def penalize_rows(
    logits: Tensor, token_rows: Tensor, places: Tensor, factors: Tensor, /, longest: int
) -> None:
    """Apply `apply_penalties` to every token in a row of tokens, counted here; logits [N, V], in place.

    token_rows [rows, columns] int32 in [0, V). places [U, 4] int64, for each of U samples: its row of the logits, all
    different; its row of tokens; the number of prompt tokens in it, and of all tokens, at most `longest`. factors [U,
    3] float64: repetition; frequency, for each time that a token was generated; presence, if it was.
    """
    vocab_size = logits.shape[1]
    for (sample, row, num_prompt, num_tokens), of_row in zip(places.tolist(), factors, strict=True):
        tokens = token_rows[row, :num_tokens].long()
        counts = torch.bincount(tokens[num_prompt:], minlength=vocab_size)
        seen = torch.unique(tokens)
        repetition, frequency, presence = of_row
        subtracted = frequency * counts[seen] + presence * (counts[seen] > 0)
        apply_penalties(logits, sample * vocab_size + seen, repetition.expand(len(seen)), subtracted)


def sample_tokens(
    logits: Tensor, settings: Tensor, keys: Tensor | None, /, limits: SamplingLimits = ANY_LIMITS
) -> Tensor:
    """Sample one token per row: logits [N, V] -> ids [N] int64, -1 for a row whose logits are all -inf.

    settings [N, 4] float64: temperature, ln(min_p), top_k, top_p. Temperature 0 takes the first token of the order.
    Otherwise logits are divided by the temperature; tokens less likely than min_p times the first are dropped (N.
    Nguyen et al., "Turning up the heat", 2024; -inf is off); the `top_k` first tokens are kept (A. Fan et al.,
    "Hierarchical neural story generation", 2018; V is off) and of those the fewest first ones that hold `top_p` of
    their mass (A. Holtzman et al., "The curious case of neural text degeneration", 2019; 1 is off). `limits` says which
    of the three any row uses.

    A remaining token is drawn by its probability, with random numbers that are a function of keys [N, 2] int64, a seed
    and a position for each row; None if all have temperature 0. Philox4x32-10: J. Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3" (2011). The method depends on the device, and so does the token of a seed. A CPU uses
    inverse transform sampling, which needs one number: in id order, with c the cumulative weights in float64 and u from
    `philox.uniform`, the first token whose c exceeds u * c[-1]. A GPU uses the Gumbel-max trick, which needs a number
    for each token but no sums: the token with the largest logit plus `philox.gumbel`, ties by lower id.

    Implementations differ only if rounding (1e-6 of the total mass, or of a Gumbel number) decides on which side of a
    boundary something falls, and on tokens e**87 times less likely than the first, which may count as impossible.
    """
    if keys is None:
        keys = torch.zeros(len(logits), 2, dtype=torch.int64, device=logits.device)
    if logits.is_cpu:
        return sample_by_inversion(logits, settings, uniforms(keys))
    return sample_by_gumbel(logits, settings, keys)


def uniforms(keys: Tensor) -> Tensor:
    """Return the numbers [N] float64 of inverse transform sampling, for seeds and positions [N, 2]."""
    return torch.from_numpy(uniform(*keys.cpu().numpy().T)).to(keys.device)


def sample_by_inversion(logits: Tensor, settings: Tensor, numbers: Tensor) -> Tensor:
    """Sample as `ops.sample_tokens` does on a CPU, from numbers [N] float64 in [0, 1)."""
    return _sample(logits, settings, lambda shaped, rows: _invert(shaped, numbers[rows]))


def sample_by_gumbel(logits: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
    """Sample as `ops.sample_tokens` does on a GPU."""

    def draw(shaped: Tensor, rows: Tensor) -> Tensor:
        noise = np.stack([gumbel(seed, position, shaped.shape[1]) for seed, position in keys[rows].tolist()])
        return _first_of(shaped.double() + torch.from_numpy(noise).to(shaped.device))

    return _sample(logits, settings, draw)


Draw = Callable[[Tensor, Tensor], Tensor]
"""(logits [U, V] of the distributions, their rows [U]) -> tokens [U]."""


def _sample(logits: Tensor, settings: Tensor, draw: Draw) -> Tensor:
    size = max(1, _SLICE_ELEMENTS // logits.shape[1])
    starts = range(0, max(len(logits), 1), size)
    return torch.cat([_sample_slice(logits, settings, draw, slice(start, start + size)) for start in starts])


def _sample_slice(logits: Tensor, settings: Tensor, draw: Draw, part: slice) -> Tensor:
    logits, settings = logits[part], settings[part]
    chosen = _first_of(logits)
    random = (settings[:, 0] != 0.0).nonzero().squeeze(1)
    if len(random):
        chosen[random] = draw(shaped_logits(logits[random], settings[random]), random + part.start)
    return torch.where(logits.amax(1) == -torch.inf, -1, chosen)


def _first_of(values: Tensor) -> Tensor:
    # numpy's argmax is vectorized and torch's is not: a tenth of the time. It returns the lowest index of equals.
    return torch.from_numpy(values.cpu().numpy().argmax(axis=1)).to(values.device)


def shaped_logits(logits: Tensor, settings: Tensor) -> Tensor:
    """Return the logits of the distribution to draw from, from logits [N, V], changed in place, and settings [N, 4]."""
    _scale(logits, settings)
    top_k, top_p = settings[:, 2].long(), settings[:, 3]
    cut = ((top_k < logits.shape[1]) | (top_p < 1.0)).nonzero().squeeze(1)
    if len(cut):
        logits[cut] = _truncated(logits[cut], top_k[cut], top_p[cut])
    return logits


def shaped_at_once(logits: Tensor, settings: Tensor, limits: SamplingLimits) -> Tensor:
    """Return `shaped_logits` without a device-to-host sync; rows are sorted entirely."""
    _scale(logits, settings)
    vocab_size, (top_k, top_p) = logits.shape[1], (settings[:, 2].long(), settings[:, 3])
    size = max(1, _SORTED_ELEMENTS // vocab_size)
    for start in range(0, len(logits) if limits.top_k or limits.top_p else 0, size):
        part = slice(start, start + size)
        keys, probs = order_keys(logits[part]), logits[part].softmax(1, dtype=torch.float64)
        last = _last_kept_key(keys, probs, top_k[part], top_p[part], vocab_size)
        logits[part].masked_fill_(keys < last[:, None], -torch.inf)
    return logits


def _scale(logits: Tensor, settings: Tensor) -> None:
    """Divide by the temperature, and drop tokens by min_p."""
    temperature, log_min_p = settings[:, :2].float().unbind(1)
    logits.div_(temperature[:, None]).clamp_(max=_MAX_LOGIT)
    lowest = logits.amax(1) + log_min_p
    logits.masked_fill_(logits < lowest[:, None], -torch.inf)


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the `top_k` first tokens, and of those the fewest first ones that hold `top_p` of the remaining mass.

    Both keep a prefix of the order of tokens. That prefix's last key is found by partial selection, widened for the
    rows whose mass lies deeper; a wider selection gives the same answer.
    """
    keys = order_keys(logits)
    width = int(top_k.where(top_k < logits.shape[1], min(_FIRST_WIDTH, logits.shape[1])).max())
    last = _last_kept_key(keys, logits.softmax(1, dtype=torch.float64), top_k, top_p, width)
    return logits.masked_fill_(keys < last[:, None], -torch.inf)


def _last_kept_key(keys: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Return the key of the last token that each row keeps, [U]; `keys` and `probs` are [U, V]."""
    vocab_size = keys.shape[1]
    best = keys.topk(width).values
    mass = probs.gather(1, ids_of(best, vocab_size)).cumsum(1)
    is_limited = top_k < vocab_size
    total = torch.where(is_limited, mass.gather(1, top_k.clamp(max=width)[:, None] - 1).squeeze(1), 1.0)
    # top_p = 1 keeps everything, including mass lost in the rounding of the sum.
    wanted = torch.where(top_p < 1.0, top_p * total, torch.inf)
    is_before_enough = torch.nn.functional.pad(mass[:, :-1], (1, 0)) < wanted[:, None]
    num_kept = torch.minimum(is_before_enough.sum(1), top_k).clamp(min=1)
    last = best.gather(1, num_kept.clamp(max=width)[:, None] - 1).squeeze(1)
    if width == vocab_size:
        return last
    deeper = torch.nonzero(~is_limited & (mass[:, -1] < wanted)).squeeze(1)
    if len(deeper):
        wider = min(width * _WIDENING, vocab_size)
        last[deeper] = _last_kept_key(keys[deeper], probs[deeper], top_k[deeper], top_p[deeper], wider)
    return last


def _invert(logits: Tensor, numbers: Tensor) -> Tensor:
    cumulative = logits.softmax(1, dtype=torch.float64).cumsum_(1)
    targets = numbers[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # Only a row without any possible token (all NaN) gets past the end.
    return torch.where(chosen < logits.shape[1], chosen, -1)


def token_logprobs(logits: Tensor, chosen: Tensor, /, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-softmax of finite logits for the chosen token and the first `num_top` <= V of the order.

    chosen [N] int64 in [0, V), else an IndexError -> ids [N, 1 + num_top] int64, the chosen one first; their logprobs
    float32; ranks of the chosen tokens, from 1, [N] int64.
    """
    if num_top == 0 and logits.is_cpu:
        of_chosen = logits.log_softmax(1).gather(1, chosen[:, None])
        return chosen[:, None], of_chosen, _rank_among(logits, chosen)
    keys = order_keys(logits)
    best = ids_of(keys.topk(num_top).values, logits.shape[1])
    ids = torch.cat((chosen[:, None], best), dim=1)
    return ids, logits.log_softmax(1).gather(1, ids), rank_of(keys, chosen)


def _rank_among(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return `rank_of` for one token per row [N] of logits [N, V] on the host, in a fraction of the time of keys."""
    ranks = [
        1 + np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
        for row, token in zip(logits.numpy(), token_ids.tolist(), strict=True)
    ]
    return torch.tensor(ranks, dtype=torch.int64)
