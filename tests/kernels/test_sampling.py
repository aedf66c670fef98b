# SPDX-License-Identifier: Apache-2.0
"""The native sampling tail: the oracle's tokens, the same bits in any company, and refusals instead of bad memory."""

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels import ops, reference_sampling
from quire.kernels.attention_metadata import ANY_LIMITS, NO_LIMITS, SamplingLimits
from quire.kernels.cpu import library
from quire.kernels.cpu.library import set_num_threads
from quire.kernels.dispatch_mode import DispatchMode
from tests.fixtures.folded import folded
from tests.kernels.op_cases import random_keys, settings

if library.loaded() is None:
    pytest.skip(library.status(), allow_module_level=True)

from quire.kernels.cpu import sampling

OFF = (1.0, -torch.inf, 1e9, 1.0)


def one(logits: list[float], *, u: float = 0.5, setting: tuple[float, ...] = OFF) -> int:
    """The token of one row."""
    temperature, log_min_p, top_k, top_p = setting
    setting = (temperature, log_min_p, min(top_k, len(logits)), top_p)
    staged = torch.tensor([setting], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)
    results = [
        module.sample_by_inversion(torch.tensor([logits]), *staged)
        for module in (sampling, reference_sampling)
    ]
    assert torch.equal(*results)
    return int(results[0])


@hypothesis_settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 7, 8, 9, 300, 4099]),
    st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
)
def test_random_rows_draw_the_tokens_of_the_oracle(seed: int, vocab_size: int, spread: float) -> None:
    """Rows of any width and spread draw equal tokens if u and top_p are off their boundaries, as random ones are."""
    torch.manual_seed(seed)
    logits = torch.randn(24, vocab_size) * spread
    args = settings(24, vocab_size), random_keys(24)
    assert torch.equal(sampling.sample_tokens(logits, *args), ops.sample_tokens.oracle(logits.clone(), *args))


def test_a_cut_in_a_crowd_of_equals_is_by_id() -> None:
    """More equals than the selection sorts: it has to narrow them down by id."""
    logits = torch.zeros(1, 5000)
    logits[0, 4321] = 1e-3
    for top_k in (1, 2, 1000, 4321, 4322, 4999):
        kept = {4321, *range(top_k if top_k > 4321 else top_k - 1)}
        setting = torch.tensor([(1.0, -torch.inf, top_k, 1.0)], dtype=torch.float64)
        draws = torch.linspace(0, 1 - 1e-9, 300, dtype=torch.float64)
        rows = logits.expand(300, -1).contiguous()
        chosen = sampling.sample_by_inversion(rows, setting.repeat(300, 1), draws)
        assert set(chosen.tolist()) <= kept
        assert int(chosen.max()) == max(kept)


def test_limits_in_far_and_empty_bins() -> None:
    logits = [0.0, -200.0, -1e30, -torch.inf, -3e38, -50.0]
    for top_k in (1, 2, 3, 5, 6):
        assert one(logits, u=1 - 2**-52, setting=(1.0, -torch.inf, top_k, 1.0)) == 0
    assert one([3e38, -3e38, 3e38], u=0.9, setting=(0.5, -torch.inf, 2, 0.9)) == 2
    assert one([-1e30] * 3, u=0.9, setting=(1e-30, -torch.inf, 3, 0.9)) == -1


@pytest.mark.parametrize(
    ("u", "logits", "token"),
    [
        (0.0, [-torch.inf, 0.0, 0.0], 1),
        (1 - 2**-52, [0.0, 0.0, -torch.inf], 1),
        (0.5, [0.0, 0.0, -torch.inf], 1),
        (0.3, [-torch.inf], -1),
        (0.3, [-torch.inf, -torch.inf], -1),
    ],
)
def test_draw_at_the_edges_never_takes_a_dropped_token(u: float, logits: list[float], token: int) -> None:
    assert one(logits, u=u) == token


def test_greedy_takes_the_lowest_of_equals() -> None:
    greedy = (0.0, -torch.inf, 1e9, 1.0)
    assert one([-0.0, 0.0, -0.0], setting=greedy) == 0
    assert one([*[0.0] * 100, 4.0, 4.0, *[0.0] * 100], setting=greedy) == 100


def test_uniforms_have_the_bits_of_the_oracle() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    positions = torch.tensor([0, 1, 2**40, 7, 2**32, 2**32 - 1])
    keys = torch.stack([seeds, positions], dim=1)
    assert torch.equal(sampling.uniforms(keys), reference_sampling.uniforms(keys))


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Tensor:
    parts = sampling.token_logprobs(logits, chosen, count)
    return torch.cat([part.double().view(len(logits), -1) for part in parts], dim=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, chosen, *staged: sampling.sample_tokens(x, *staged),
        lambda x, chosen, *staged: logprobs(x, chosen, 5),
        lambda x, chosen, *staged: logprobs(x, chosen, 100),
        lambda x, chosen, *staged: sampling.unusable_rows(x),
    ],
    ids=["sample_tokens", "few logprobs", "many logprobs", "unusable_rows"],
)
def test_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    function: Callable[..., Tensor], restore_threads: None
) -> None:
    torch.manual_seed(1)
    x = (
        torch.randn(40, 5003) * 3
    )  # enough elements for a parallel loop; an odd width moves every row's alignment
    assert x.numel() >= 1 << 16
    args = x, torch.randint(0, 5003, (40,)), settings(40, 5003), random_keys(40)
    set_num_threads(1)
    alone = torch.cat([function(*(arg[row : row + 1].clone() for arg in args)) for row in range(40)])
    for threads in (1, 2, 3):
        set_num_threads(threads)
        assert torch.equal(function(*args), alone)
        assert torch.equal(function(*(arg[7:] for arg in args)), alone[7:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_stay_within_memory(bad: float) -> None:
    x = torch.full((2, 70), bad)
    for count in (0, 5, 70):
        ids, _, _ = sampling.token_logprobs(x, torch.tensor([3, 69]), count)
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 70
    chosen = sampling.sample_tokens(x, settings(2, 70), random_keys(2))
    assert int(chosen.min()) >= -1
    assert int(chosen.max()) < 70


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """The system gives the process so much more, and no further; garbage of other tests is not given back meanwhile."""
    gc.collect()
    gc.disable()
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the process's size is not to be known")
@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer ends the process for want of memory"
)
def test_failed_allocation_is_an_error_not_a_crash(restore_threads: None) -> None:
    """Candidates of a cut among 4 million equals take 64 MiB, and 16 million keys 128: more than lies about."""
    logits, wide, chosen = torch.zeros(2, 1 << 22), torch.zeros(2, 1 << 24), torch.zeros(2, dtype=torch.int64)
    setting = (1.0, -torch.inf, 7, 1.0)
    staged = torch.tensor([setting, setting], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    for threads in (1, 2):
        set_num_threads(threads)
        with little_memory(1 << 24):
            with pytest.raises(MemoryError, match="sample_tokens: no memory"):
                sampling.sample_by_inversion(logits, *staged)
            with pytest.raises(MemoryError, match="token_logprobs: no memory"):
                sampling.token_logprobs(wide, chosen, 100)
    assert sampling.sample_by_inversion(logits, *staged).tolist() == [3, 3]


def test_mask_does_the_same_on_any_threads_to_its_rows_only(restore_threads: None) -> None:
    torch.manual_seed(2)
    x, rows = torch.randn(9, 40_011), torch.tensor([7, 0, 4, 8])
    words = torch.randint(-(2**31), 2**31, (4, 1251), dtype=torch.int32)
    words[:, ::3], words[:, 1::3] = 0, -1
    expected = x.clone()
    reference_sampling.mask_logits(expected, rows, words)
    assert expected.isinf().sum(1).bool().tolist() == [True, *[False] * 3, True, *[False] * 2, True, True]
    for threads in (1, 2, 3):
        set_num_threads(threads)
        found = x.clone()
        sampling.mask_logits(found, rows, words)
        assert torch.equal(found, expected)


def good() -> dict[str, Tensor]:
    return {
        "logits": torch.zeros(2, 5),
        "settings": torch.tensor([OFF, OFF], dtype=torch.float64),
        "keys": torch.zeros(2, 2, dtype=torch.int64),
    }


@folded(
    ("call", "error", "message"),
    [
        (lambda: sample(logits=torch.zeros(2, 5).half()), TypeError, "must be float32 on the CPU"),
        (lambda: sample(logits=torch.zeros(2, 0)), ValueError, "contiguous"),
        (lambda: sample(logits=torch.zeros(5, 2).t()), ValueError, "contiguous"),
        (lambda: sample(settings=torch.zeros(2, 3).double()), ValueError, r"settings must be .*\[2, 4\]"),
        (lambda: sample(keys=torch.zeros(2, 2)), ValueError, r"keys must be .*\[2, 2\]"),
        (lambda: sample(keys=torch.zeros(2).long()), ValueError, "keys must be"),
        (lambda: sample(keys=torch.zeros(3, 2).long()), ValueError, "numbers must be"),
        (
            lambda: sampling.token_logprobs(torch.zeros(1, 5), torch.tensor([5]), 1),
            IndexError,
            "vocabulary of 5",
        ),
        (
            lambda: sampling.token_logprobs(torch.zeros(1, 5), torch.tensor([-1]), 1),
            IndexError,
            "vocabulary of 5",
        ),
        (
            lambda: sampling.token_logprobs(torch.zeros(1, 5), torch.tensor([0]), 6),
            ValueError,
            r"in \[0, 5\]",
        ),
        (lambda: penalties(torch.tensor([10])), IndexError, "outside the 10 logits"),
        (lambda: penalties(torch.tensor([-1])), IndexError, "outside the 10 logits"),
        (lambda: penalties(torch.tensor([1, 2])), ValueError, "repetition must be"),
        (lambda: mask(torch.tensor([0, 2])), IndexError, r"1 of \[0, 2\] are no rows of 2"),
        (lambda: mask(torch.tensor([-1, 1])), IndexError, "are no rows"),
        (lambda: mask(torch.tensor([1])), ValueError, r"words must be contiguous int32 \[1, 1\]"),
    ],
)
def test_wrong_arguments_are_clear_errors(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def sample(**changed: Tensor) -> None:
    sampling.sample_tokens(*(good() | changed).values())


def penalties(indices: Tensor) -> None:
    one_each = torch.ones(1, dtype=torch.float64)
    sampling.apply_penalties(torch.zeros(2, 5), indices, one_each, one_each)


def mask(rows: Tensor) -> None:
    sampling.mask_logits(torch.zeros(2, 5), rows, torch.zeros(2, 1, dtype=torch.int32))


class _Waits(DispatchMode):
    """While active: which operations tell the host a number of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("vocab_size", [7, 1003])
@pytest.mark.parametrize(
    "limits", [ANY_LIMITS, SamplingLimits(True, False, True), SamplingLimits(True, True, False), NO_LIMITS]
)
def test_logits_are_processed_alike_without_waiting(
    vocab_size: int, limits: SamplingLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_sampling, "_SORTED_ELEMENTS", 3 * vocab_size)
    torch.manual_seed(0)
    logits, wanted = 3 * torch.randn(11, vocab_size), settings(11, vocab_size)
    logits[2, ::2] = -torch.inf
    wanted[:, 0].clamp_(min=0.3)
    if not limits.top_k:
        wanted[:, 2] = vocab_size
    if not limits.top_p:
        wanted[:, 3] = 1.0
    expected = reference_sampling.shaped_logits(logits.clone(), wanted)
    with _Waits() as waits:
        got = reference_sampling.shaped_at_once(logits.clone(), wanted, limits)
    assert waits.names == []
    assert torch.equal(got, expected)
