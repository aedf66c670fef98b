# SPDX-License-Identifier: Apache-2.0
"""The GPU's routing and experts in Triton's interpreter: against the oracle, and themselves in other company.

float32 and float16 only: the interpreter's `tl.dot` on bfloat16 is wrong.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.config.arch import Routing
from quire.kernels import ops, reference
from quire.kernels.experts import ExpertWeights, make_contiguous, stacked, with_scales_alike
from quire.kernels.linear import PackedWeight, WeightScheme
from quire.kernels.triton import experts, linear, matmul_tile
from tests.kernels.op_cases import ROUTINGS, close, expert_adapters, randn

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are meant
FLOAT = WeightScheme(fast=False)
INTEGERS = [
    WeightScheme("int8"),
    WeightScheme("int4", 32),
    WeightScheme("int4", 64, symmetric=False),
    WeightScheme("e2m1", 32),
]
FP8 = WeightScheme("fp8")
COUNT, TOP_K, HIDDEN, INNER = 5, 2, 45, 35
TOLERANCES = {torch.float32: 1e-4, torch.float16: 6e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an expert has several, of few rows."""
    for module in (experts, matmul_tile):
        monkeypatch.setattr(module, "BLOCK_M", 16)
        monkeypatch.setattr(module, "BLOCK_N", 32)


def weights_of(
    scheme: WeightScheme, dtype: torch.dtype = torch.float32, *, biased: bool = False
) -> ExpertWeights:
    torch.manual_seed(0)

    def matrices(outputs: int, inputs: int, halves: int) -> tuple[PackedWeight, ...]:
        rows = (randn(outputs, inputs) * inputs**-0.5 for _ in range(COUNT))
        packed = [linear.pack_weight(each.to(dtype), scheme, halves) for each in rows]
        return with_scales_alike(packed)

    biases = (tuple(randn(size) for _ in range(COUNT)) if biased else () for size in (2 * INNER, HIDDEN))
    return ExpertWeights(matrices(2 * INNER, HIDDEN, 2), matrices(HIDDEN, INNER, 1), *biases)


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Those of low number more often, and the last one never."""
    ranks = torch.rand(tokens, COUNT - 1) - 0.4 * torch.arange(COUNT - 1) / COUNT
    return ranks.argsort(1, descending=True)[:, :TOP_K].int(), torch.rand(tokens, TOP_K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("routing", "count"), ROUTINGS, ids=str)
def test_route(routing: Routing, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows in (0, 1, 9):
        logits = randn(rows, count + 3, dtype=dtype)[:, 3:]
        for bias in (None, torch.rand(count)) if routing.scores != "sparsemixer" else (None,):
            got, want = (function(logits, bias, routing) for function in (experts.route, ops.route.oracle))
            assert torch.equal(got[0], want[0])
            close(got[1], want[1], torch.float32)


def test_route_picks_the_first_of_equal_scores() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    for scores in ("softmax", "sigmoid"):
        assert experts.route(logits, None, Routing(5, scores))[0].tolist() == [[1, 2, 4, 0, 3]]


def test_logits_that_are_not_finite_still_choose_experts() -> None:
    logits = torch.full((3, 10), torch.nan)
    logits[1, 4:] = 0.0
    logits[2, 3] = torch.inf
    for routing in (Routing(4), Routing(4, "sparsemixer", reach=0.5), Routing(4, groups=5, top_groups=3)):
        chosen, _ = experts.route(logits, None, routing)
        assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 10 for row in chosen.tolist())


@pytest.mark.more
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu_and_mul", "clamped_swiglu"])
@pytest.mark.parametrize("scheme", [FLOAT, *INTEGERS], ids=str)
def test_experts(scheme: WeightScheme, activation: str, dtype: torch.dtype) -> None:
    of = replace(weights_of(scheme, dtype, biased=activation != "silu_and_mul"), activation=activation)
    exact = replace(of, gate_up=in_floats(of.gate_up), down=in_floats(of.down))
    for tokens in (0, 1, 50):
        x = randn(tokens, HIDDEN + 4, dtype=dtype)[:, 4:]
        chosen, weights = choices(tokens)
        want = ops.experts.oracle(x.float(), chosen, weights, exact)
        got = experts.experts(x, chosen, weights, of)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_experts_with_adapters() -> None:
    of = replace(weights_of(FLOAT, biased=True), activation="clamped_swiglu")
    adapters, (chosen, weights), x = expert_adapters(2, of), choices(20), randn(20, HIDDEN)
    own = torch.randint(-1, 3, (20,), dtype=torch.int32)  # of which 2 is none, and adds nothing
    exact = replace(of, gate_up=in_floats(of.gate_up), down=in_floats(of.down))
    got = experts.experts(x, chosen, weights, of, own, adapters)
    want = ops.experts.oracle(x, chosen, weights, exact, own.where(own < 2, -1), adapters)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    plain = experts.experts(x, chosen, weights, of)
    assert torch.equal((got == plain).all(1), (own < 0) | (own == 2))
    alone = experts.experts(x[3:5], chosen[3:5], weights[3:5], of, own[3:5], adapters)
    assert torch.equal(alone, got[3:5])


def in_floats(matrices: tuple[PackedWeight, ...]) -> tuple[PackedWeight, ...]:
    """Return the weights as floats: on a GPU no integer weight is multiplied by rounded activations."""
    return tuple(
        linear.pack_weight(reference.unpack_weight(matrix).float(), FLOAT, matrix.halves)
        for matrix in matrices
    )


def test_experts_in_fp8() -> None:
    """Numbers that E4M3 holds, and a scale of 1/64: the interpreter rounds others wrongly."""
    of, (chosen, weights) = weights_of(FP8), choices(9)
    x = randn(9, HIDDEN).to(torch.float8_e4m3fn).float()
    x[:, 0] = 7.0
    got, want = (run(x, chosen, weights, of) for run in (experts.experts, ops.experts.oracle))
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


@pytest.mark.more
@pytest.mark.parametrize("scheme", [FLOAT, INTEGERS[1], FP8], ids=str)
def test_a_token_has_the_same_bits_in_any_company(scheme: WeightScheme) -> None:
    of = weights_of(scheme, torch.float16)
    x, (chosen, weights) = randn(45, HIDDEN, dtype=torch.float16), choices(45)
    together = experts.experts(x, chosen, weights, of)
    assert 45 * TOP_K > 45 * TOP_K // matmul_tile.BLOCK_M + COUNT, "tiles are found by a search"
    for rows in (slice(0, 1), slice(40, 43), slice(3, 30)):
        assert torch.equal(experts.experts(x[rows], chosen[rows], weights[rows], of), together[rows])
    turned = experts.experts(x[:20], chosen[:20].flip(1).contiguous(), weights[:20].flip(1).contiguous(), of)
    assert torch.equal(turned, together[:20])


@pytest.mark.parametrize("tokens", [2, 50])
def test_unselected_experts_are_unread_and_none_adds_nothing(tokens: int) -> None:
    of = weights_of(FLOAT)
    of.down[COUNT - 1].data.fill_(torch.nan)
    x, (chosen, weights) = randn(tokens, HIDDEN), choices(tokens)
    want = experts.experts(x, chosen, weights, of)
    assert want.isfinite().all()
    chosen[0], chosen[1, 0] = torch.tensor([-1, COUNT]), 2**30
    got = experts.experts(x, chosen, weights, of)
    assert not got[0].any()
    assert torch.equal(got[2:], want[2:])
    alone = experts.experts(x[1:2], chosen[1:2, 1:].contiguous(), weights[1:2, 1:].contiguous(), of)
    assert torch.equal(got[1:2], alone)


def test_experts_that_lie_together_are_not_copied() -> None:
    with torch.inference_mode():
        made = [randn(3, 4) for _ in range(5)]
    parts = [*made, *(torch.nn.Parameter(randn(3, 4), requires_grad=False) for _ in range(4))]
    for some in (parts[:5], parts[5:]):
        want = torch.stack([*some])
        assert torch.equal(stacked(some), want)
        assert stacked(some).data_ptr() != some[0].data_ptr()
        make_contiguous(some)
        assert torch.equal(stacked(some), want)
        assert stacked(some).data_ptr() == some[0].data_ptr()
        assert stacked(some[1:3]).data_ptr() == some[1].data_ptr()
        assert stacked([some[1], some[0]]).data_ptr() not in {part.data_ptr() for part in some}


def test_panels_are_no_business_of_the_gpu_kernels() -> None:
    row = next(row for row in ops.experts.implementations if row.name == "triton")
    assert row.accepts is not None
    of, nothing = weights_of(FLOAT), torch.empty(0)
    panels = replace(of, gate_up=tuple(reference.pack_weight(randn(4, 4), FLOAT) for _ in range(COUNT)))
    assert [row.accepts(nothing, nothing, nothing, each) for each in (of, panels)] == [True, False]
