"""The oracle of the sampling ops: logits in, one token per row out.

Invariant: floating-point work is row by row (softmax, cumulative sums), never an element-wise function over the
whole batch whose vector lanes would depend on a row's place in it.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels.limits import Limits
from quire.kernels.philox import gumbel, uniform
from quire.kernels.token_order import ids_of, order_keys, rank_of

# Rows are sampled so many at a time that the allocator recycles the float64 and int64 copies of their logits (elements,
# 8 MiB each); larger ones would be fresh pages of the system every time, which costs more than the arithmetic.
_SLICE_ELEMENTS = 1 << 20
_MAX_LOGIT = torch.finfo(torch.float32).max
_SORTED_ELEMENTS = 1 << 22
"""That are sorted at once: some 50 bytes each."""
_FIRST_WIDTH = 64
_WIDENING = 16


def unusable_rows(logits: Tensor) -> Tensor:
    # The sum is far cheaper than looking at every element. It can overflow for huge finite logits, and a token may be
    # impossible: look again then.
    suspects = ~logits.sum(1).isfinite()
    for row in suspects.nonzero().squeeze(1).tolist():
        suspects[row] = not logits[row].amax().isfinite()  # a maximum hands on a NaN
    return suspects


def clear_rows(logits: Tensor, cleared: Tensor) -> None:
    if cleared.cpu().numpy().any():  # on small tensors half the time of torch's
        logits[cleared] = 0.0


def mask_logits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor) -> None:
    flat = logits.view(-1)
    # In float64, and brought back into range: a tiny or huge factor must not make an infinity or a NaN.
    values = flat[indices].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = (values - subtracted).clamp_(max=_MAX_LOGIT).float()


def penalise_rows(logits: Tensor, token_rows: Tensor, places: Tensor, factors: Tensor) -> None:
    vocab_size = logits.shape[1]
    for (sample, row, num_prompt, num_tokens), of_row in zip(places.tolist(), factors, strict=True):
        tokens = token_rows[row, :num_tokens].long()
        counts = torch.bincount(tokens[num_prompt:], minlength=vocab_size)
        seen = torch.unique(tokens)
        repetition, frequency, presence = of_row
        subtracted = frequency * counts[seen] + presence * (counts[seen] > 0)
        apply_penalties(logits, sample * vocab_size + seen, repetition.expand(len(seen)), subtracted)


def sample_tokens(logits: Tensor, settings: Tensor, keys: Tensor | None) -> Tensor:
    if keys is None:
        keys = torch.zeros(len(logits), 2, dtype=torch.int64, device=logits.device)
    if logits.is_cpu:
        return sample_by_inversion(logits, settings, uniforms(keys))
    return sample_by_gumbel(logits, settings, keys)


def uniforms(keys: Tensor) -> Tensor:
    """The numbers [N] float64 of inverse transform sampling, for seeds and positions [N, 2]."""
    return torch.from_numpy(uniform(*keys.cpu().numpy().T)).to(keys.device)


def sample_by_inversion(logits: Tensor, settings: Tensor, numbers: Tensor) -> Tensor:
    """`ops.sample_tokens` as on a CPU, from numbers [N] float64 in [0, 1)."""
    return _sample(logits, settings, lambda shaped, rows: _invert(shaped, numbers[rows]))


def sample_by_gumbel(logits: Tensor, settings: Tensor, keys: Tensor) -> Tensor:
    """`ops.sample_tokens` as on a GPU."""

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
    # numpy's argmax is vectorized and torch's is not: a tenth of the time. It takes the lowest index of equals.
    return torch.from_numpy(values.cpu().numpy().argmax(axis=1)).to(values.device)


def shaped_logits(logits: Tensor, settings: Tensor) -> Tensor:
    """Logits [N, V], which are changed, and settings [N, 4] -> logits of the distribution to draw from."""
    _scale(logits, settings)
    top_k, top_p = settings[:, 2].long(), settings[:, 3]
    cut = ((top_k < logits.shape[1]) | (top_p < 1.0)).nonzero().squeeze(1)
    if len(cut):
        logits[cut] = _truncated(logits[cut], top_k[cut], top_p[cut])
    return logits


def shaped_at_once(logits: Tensor, settings: Tensor, limits: Limits) -> Tensor:
    """`shaped_logits` where the host looks at no number, so that it waits for no device; rows are sorted whole."""
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
    """Divide by the temperature, and drop what min_p does."""
    temperature, log_min_p = settings[:, :2].float().unbind(1)
    logits.div_(temperature[:, None]).clamp_(max=_MAX_LOGIT)
    lowest = logits.amax(1) + log_min_p
    logits.masked_fill_(logits < lowest[:, None], -torch.inf)


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The `top_k` first tokens, of those the fewest first ones that hold `top_p` of the mass left.

    Both keep a prefix of the order of tokens, so what is looked for is that prefix's last key: by partial
    selection, widened for the rows whose mass lies deeper; a wider look gives the same answer.
    """
    keys = order_keys(logits)
    width = int(top_k.where(top_k < logits.shape[1], min(_FIRST_WIDTH, logits.shape[1])).max())
    last = _last_kept_key(keys, logits.softmax(1, dtype=torch.float64), top_k, top_p, width)
    return logits.masked_fill_(keys < last[:, None], -torch.inf)


def _last_kept_key(keys: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """Key of the last token that each row keeps, [U]; `keys` and `probs` are [U, V]."""
    vocab_size = keys.shape[1]
    best = keys.topk(width).values
    mass = probs.gather(1, ids_of(best, vocab_size)).cumsum(1)
    is_limited = top_k < vocab_size
    total = torch.where(is_limited, mass.gather(1, top_k.clamp(max=width)[:, None] - 1).squeeze(1), 1.0)
    # top_p = 1 keeps everything, also what is lost in the rounding of the sum.
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
    # Only a row without any token left (all NaN) gets past the end.
    return torch.where(chosen < logits.shape[1], chosen, -1)


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = order_keys(logits)
    best = ids_of(keys.topk(num_top).values, logits.shape[1])
    ids = torch.cat((chosen[:, None], best), dim=1)
    return ids, logits.log_softmax(1).gather(1, ids), rank_of(keys, chosen)
