# SPDX-License-Identifier: Apache-2.0
"""The sampling tail of GPUs in Triton's interpreter: the oracle's choices, the same bits in any split, fair draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
import triton
import triton.language as tl

from quire.kernels import ops, reference_sampling
from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS, SamplingLimits
from quire.kernels.triton import logprobs, primitives, sampling
from quire.kernels.triton import logprobs as logits_kernels
from tests.fixtures.quick import quick
from tests.kernels.op_cases import compare, randn, random_keys, settings

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are meant
OFF = (1.0, -torch.inf, 1e9, 1.0)
KEYS = [(0, 0), (1, 2**40), (-1, 7), (2**63 - 1, 2**32), (-(2**63), 2**32 - 1)]


@triton.jit
def _fractions_of(out, seeds, positions, TILE: tl.constexpr):
    for tile in tl.static_range(2):
        v = sampling.fractions(tl.load(seeds), tl.load(positions), tile * TILE, TILE)
        tl.store(out + tile * TILE + tl.arange(0, TILE), v)


@triton.jit
def _gumbel_of(out, seeds, positions, TILE: tl.constexpr):
    tl.store(out + tl.arange(0, TILE), sampling.gumbel(tl.load(seeds), tl.load(positions), 0, TILE))


@triton.jit
def _ends(fractions, gumbels, high, low, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    v = sampling.fraction_of(tl.load(high + index).to(tl.uint32), tl.load(low + index).to(tl.uint32))
    tl.store(fractions + index, v)
    tl.store(gumbels + index, sampling.gumbel_of(v))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_noise_has_the_bits_of_the_oracle(key: tuple[int, int]) -> None:
    out, key_tensors = torch.empty(128), [torch.tensor([value]) for value in key]
    _fractions_of[(1,)](out, *key_tensors, TILE=64)
    assert torch.equal(out, torch.from_numpy(reference_sampling.fractions(*key, 128)))
    _gumbel_of[(1,)](out, *key_tensors, TILE=128)
    torch.testing.assert_close(
        out.double(), torch.from_numpy(reference_sampling.gumbel(*key, 128)), rtol=2e-6, atol=2e-6
    )


def test_noise_is_finite_and_precise_at_the_ends() -> None:
    """So that a token with 2**-64 of the mass can win; and where the series and the logarithm meet."""
    ones = 2**32 - 1
    words = torch.tensor(
        [[0, 0], [0, 1], [2**26 - 1, ones], [2**26, 0], [2**31, 0], [ones, 0], [ones, ones], [3, 9]]
    )
    fractions, gumbels = torch.empty(2, 8)
    _ends[(1,)](fractions, gumbels, *words.T.contiguous(), TILE=8)
    below_one = 1 - 2**-24
    assert fractions[[0, 1, 5, 6]].double().tolist() == [2**-65, 1.5 * 2**-64, below_one, below_one]
    expected = -torch.log(-torch.log1p(-fractions.double()))
    torch.testing.assert_close(gumbels.double(), expected, rtol=1e-6, atol=1e-6)
    assert gumbels[0] > 45


def cases() -> Iterator[tuple[Tensor, ...]]:
    for rows, vocab_size in [(0, 9), (2, 1), (5, 17), (2, 3001)]:
        yield 3 * randn(rows, vocab_size), settings(rows, vocab_size), random_keys(rows)
        ties = randn(rows, vocab_size).mul_(2).round_()
        ties[ties == 3] = -torch.inf
        yield ties, settings(rows, vocab_size), random_keys(rows)
    yield torch.full((2, 9), -torch.inf), settings(2, 9), random_keys(2)


@pytest.mark.more
def test_tokens_are_those_of_the_oracle_in_any_number_of_splits() -> None:
    """Greedy and random rows, with all limits and none."""
    torch.manual_seed(0)
    for case in cases():
        want = reference_sampling.sample_by_gumbel(case[0].clone(), *case[1:])
        for num_splits in (1, 3) if case[0].shape[1] > sampling.TILE else (1,):
            assert torch.equal(sampling.sample_in_splits(*case, ANY_LIMITS, num_splits), want)


@pytest.mark.parametrize("used", range(4))
def test_limits_that_no_row_uses_may_be_omitted(used: int) -> None:
    torch.manual_seed(0)
    setting = torch.tensor(OFF, dtype=torch.float64).repeat(3, 1)
    setting[:, 2] = 301
    if used:
        setting[::2, used] = (0.0, -1.5, 40.0, 0.7)[used]
    limits = [SamplingLimits(*(column == used for column in (1, 2, 3))), NO_LIMITS][used == 0]
    case = (3 * randn(3, 301), setting, random_keys(3))
    got = sampling.sample_tokens(*case, limits)
    assert torch.equal(got, sampling.sample_tokens(*case, ANY_LIMITS))
    assert torch.equal(got, reference_sampling.sample_by_gumbel(*case))


def test_greedy_rows_need_no_keys() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0], [1.0, 2.0, 2.0], [-torch.inf] * 3])
    staged = torch.tensor([(0.0, -torch.inf, 3, 1.0)], dtype=torch.float64).repeat(3, 1)
    assert sampling.sample_tokens(logits, staged, None, NO_LIMITS).tolist() == [0, 1, -1]


def test_a_rows_token_does_not_depend_on_its_neighbors() -> None:
    torch.manual_seed(0)
    case = (3 * randn(3, 301), settings(3, 301), random_keys(3))
    alone = [sampling.sample_tokens(*(part[i : i + 1] for part in case)) for i in range(3)]
    assert torch.equal(torch.cat(alone), sampling.sample_tokens(*case))


@pytest.mark.parametrize("top_k", quick([1, 1500, 2222], [1, 2222]))
def test_a_cut_in_a_crowd_of_equals_is_by_id(top_k: int) -> None:
    """Ties stand in several splits; those of the lowest ids are kept."""
    logits = torch.zeros(2, 3001)
    logits[:, 2222] = 1e-3
    kept = {2222, *range(top_k if top_k > 2222 else top_k - 1)}
    setting = torch.tensor([(1.0, -torch.inf, top_k, 1.0)], dtype=torch.float64).repeat(2, 1)
    keys = random_keys(2)
    chosen = sampling.sample_in_splits(logits, setting, keys, ANY_LIMITS, 3)
    assert set(chosen.tolist()) <= kept
    assert torch.equal(chosen, reference_sampling.sample_by_gumbel(logits, setting, keys))


WIDE = torch.tensor(
    [
        (1.0, -torch.inf, 1e9, 0.95),
        (1.0, -torch.inf, 2500, 1.0),
        (0.7, -torch.inf, 2500, 0.99),
        (1.3, -6.0, 1e9, 0.8),
        (1.0, -torch.inf, 20, 0.9),
    ]
).double()


def test_few_tokens_are_looked_at_twice_however_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program collects only the tokens next to the threshold, out of the thousands that are kept."""
    torch.manual_seed(0)
    limits = WIDE.clone()
    limits[:, 2].clamp_(max=4007)
    seen, look = list[Tensor](), sampling._bucket_rows

    def seen_look(*args: Any) -> tuple[Tensor, ...]:
        made = look(*args)
        seen.append(made[-1])
        return made

    monkeypatch.setattr(sampling, "_bucket_rows", seen_look)
    case = (3 * randn(5, 4007), limits, random_keys(5))
    want = reference_sampling.sample_by_gumbel(case[0].clone(), *case[1:])
    assert torch.equal(sampling.sample_in_splits(*case, ANY_LIMITS, 2), want)
    assert int(seen[0][:, 0].max()) < 100


ODD_ROWS = {
    "all the same": lambda row: row.fill_(2.5),
    "one far above": lambda row: row[:1].fill_(1e8),
    "one far below": lambda row: row[-1:].fill_(-3e38),
    "at both ends": lambda row: row.sign_().mul_(3e38),
    "nearly nothing": lambda row: row.mul_(1e-38),
    "hardly any": lambda row: row[2:].fill_(-torch.inf),
    "few numbers": lambda row: row.round_(),
}


@pytest.mark.parametrize("odd", quick(ODD_ROWS, ("all the same",)))
def test_rows_that_hardly_fall_into_buckets(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "CAPACITY", 200)
    torch.manual_seed(0)
    limits = WIDE.clone()
    limits[:, 2].div_(4).floor_().clamp_(max=1203)
    rows = 3 * randn(5, 1203)
    for row in rows:
        ODD_ROWS[odd](row)
    case = (rows, limits, random_keys(5))
    want = reference_sampling.sample_by_gumbel(rows.clone(), *case[1:])
    assert torch.equal(sampling.sample_tokens(*case), want)


def test_more_candidates_than_the_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the row itself is read again."""
    monkeypatch.setattr(primitives, "CAPACITY", 4)
    torch.manual_seed(0)
    limits = torch.tensor(
        [(0.7, -torch.inf, 40, 1.0), (1.3, -9.0, 301, 0.9), (1.0, -torch.inf, 2, 0.9)]
    ).double()
    case = (3 * randn(3, 301), limits, random_keys(3))
    want = reference_sampling.sample_by_gumbel(case[0].clone(), *case[1:])
    assert torch.equal(sampling.sample_tokens(*case), want)


PROBABILITIES = torch.tensor([0.4, 0.2, 0.2, 0.1, 0.05, 0.03, 0.02])
LIMITED = {
    "plain": (OFF, [1, 1, 1, 1, 1, 1, 1]),
    "temperature": ((0.5, *OFF[1:]), None),
    "top_k": ((1.0, -torch.inf, 2, 1.0), [1, 1, 0, 0, 0, 0, 0]),
    "top_p": ((1.0, -torch.inf, 7, 0.77), [1, 1, 1, 0, 0, 0, 0]),
    "top_k and top_p": ((1.0, -torch.inf, 4, 0.9), [1, 1, 1, 1, 0, 0, 0]),
    "min_p": ((1.0, math.log(0.12), 7, 1.0), [1, 1, 1, 1, 1, 0, 0]),
}
NUM_DRAWS = 4000


@pytest.mark.parametrize("limits", quick(LIMITED, ("plain", "top_k and top_p", "min_p")))
@pytest.mark.parametrize("by_position", [False, pytest.param(True, marks=pytest.mark.more)])
def test_draws_are_fair(limits: str, by_position: bool) -> None:
    """Counts of many seeds, or positions, against the exact probabilities; a fixed set of draws."""
    setting, kept = LIMITED[limits]
    numbers, same = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 5)
    keys = torch.stack((same, numbers) if by_position else (numbers, same), dim=1)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])  # of ids, so that the likely ones are not the first
    staged = torch.tensor([setting], dtype=torch.float64).repeat(NUM_DRAWS, 1)
    staged[:, 2] = staged[:, 2].clamp(max=7)
    logits = PROBABILITIES.log()[order].repeat(NUM_DRAWS, 1) + 3.0
    chosen = reference_sampling.sample_by_gumbel(logits.clone(), staged, keys)
    used = SamplingLimits(min_p="min_p" in limits, top_k="top_k" in limits, top_p="top_p" in limits)
    some = slice(0, 2 if used.top_k or used.top_p else 12)  # the interpreter takes its time
    got = sampling.sample_tokens(logits[some], staged[some], keys[some], used)
    assert torch.equal(got, chosen[some])
    weights = PROBABILITIES**2 if kept is None else PROBABILITIES * torch.tensor(kept)
    expected = NUM_DRAWS * (weights / weights.sum())[order].double()
    counts = torch.bincount(chosen, minlength=7)
    assert not counts[expected == 0].any()
    difference = (counts - expected)[expected > 0]
    assert (
        difference**2 / expected[expected > 0]
    ).sum() < 22.5  # chi-square, 6 degrees of freedom, p = 0.001


def test_noise_of_neighbors_is_unrelated() -> None:
    """Noise is uncorrelated between tokens of a pair, between positions and between seeds."""
    noise_of = np.stack(
        [reference_sampling.gumbel(seed, position, 2000) for seed in range(3) for position in range(3)]
    )
    assert abs(noise_of.mean() - 0.5772) < 0.03
    assert abs(noise_of.var() - math.pi**2 / 6) < 0.08
    assert np.abs(np.corrcoef(noise_of) - np.eye(9)).max() < 0.1
    for rows in noise_of:
        assert abs(np.corrcoef(rows[::2], rows[1::2])[0, 1]) < 0.1


def test_equal_huge_logits_still_draw() -> None:
    """Noise is added in float64, so it counts beside logits of 1e8."""
    logits = torch.full((60, 2), 1e8)
    staged = torch.tensor([(1.0, -torch.inf, 2, 1.0)], dtype=torch.float64).repeat(60, 1)
    keys = torch.stack([torch.arange(60), torch.zeros(60, dtype=torch.int64)], dim=1)
    chosen = sampling.sample_tokens(logits, staged, keys, NO_LIMITS)
    assert 15 < int(chosen.sum()) < 45


def test_masks() -> None:
    compare(ops.mask_logits, logits_kernels.mask_logits, torch.float32, "cpu")


def test_penalties() -> None:
    compare(ops.penalize_rows, logprobs.penalize_rows, torch.float32, "cpu")


@pytest.mark.parametrize("vocab_size", [2100, 20_011])
def test_unusable_rows(vocab_size: int) -> None:
    logits = randn(5, vocab_size)
    logits[1, -1], logits[2], logits[4, 7] = torch.nan, -torch.inf, torch.inf
    logits[0, 1:], logits[3, -9:] = -torch.inf, -torch.inf
    assert logits_kernels.unusable_rows(logits).tolist() == [False, True, True, False, True]
    assert not logits_kernels.unusable_rows(torch.full((1, 3), 3e38)).any()
    logits_kernels.clear_rows(logits, torch.tensor([False, True, True, False, True]))
    assert not logits[[1, 2, 4]].any()
    assert logits[0].any()
    assert not logits[[1, 2, 4]].any()


@pytest.mark.parametrize("num_top", [0, 1, 5, 17])
@pytest.mark.parametrize("piece", [8, 4096])
def test_token_logprobs(num_top: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "PIECE", piece)
    torch.manual_seed(0)
    for logits in (3 * randn(4, 17), randn(4, 17).mul_(2).round_(), randn(0, 17)):
        chosen = torch.randint(0, 17, (len(logits),))
        ids, values, ranks = logprobs.token_logprobs(logits, chosen, num_top)
        want = ops.token_logprobs.oracle(logits, chosen, num_top)
        assert torch.equal(ids, want[0])
        assert torch.equal(ranks, want[2])
        torch.testing.assert_close(values, want[1], rtol=2e-5, atol=2e-5)


def test_large_vocabulary_logprobs_have_same_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    logits, chosen = 3 * randn(3, 20_011), torch.tensor([7, 20_010, 4096])
    together = logprobs.token_logprobs(logits, chosen, 2)
    want = ops.token_logprobs.oracle(logits, chosen, 2)
    torch.testing.assert_close(together[1], want[1], rtol=2e-5, atol=2e-5)
    for row in range(3):
        alone = logprobs.token_logprobs(logits[row : row + 1], chosen[row : row + 1], 2)
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours[0], theirs[row])
