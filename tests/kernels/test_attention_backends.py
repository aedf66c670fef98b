# SPDX-License-Identifier: Apache-2.0
"""Attention backends by name: each against the oracle, and which of them may be used where."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import attention_backends, ops, reference
from quire.kernels.attention_backends import (
    BACKENDS,
    AttentionBackend,
    AttentionNeeds,
    known_backends,
    resolve_backend,
)
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kernels.cpu import library
from tests.fixtures.entry_points import Offer
from tests.kernels.op_cases import TOLERANCES, make_metadata, randn, randn_caches

CPU = AttentionNeeds("cpu", torch.float32, torch.float32, head_size=24)
GPU = AttentionNeeds("cuda", torch.bfloat16, torch.bfloat16, head_size=128)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 6},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
    "chunk": {"attention_chunk": 7},
    "bias": {"relative_bias": torch.linspace(-2, 2, 4 * 79).sin().view(4, 79)},
    "both": {"sliding_window": 18, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02])},
}
BATCHES = [[], [(1, 9), (1, 33), (1, 16)], [(5, 5), (1, 20), (17, 40), (0, 3)]]
here_only = pytest.mark.skipif(library.loaded() is None, reason=library.status())
"""For what a CPU without its own kernels chooses otherwise."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("name", [name for name in known_backends() if name != "triton"])
def test_backend_matches_the_oracle(name: str, feature: str, dtype: torch.dtype) -> None:
    """Triton's runs in its interpreter only, in test_triton.py."""
    torch.manual_seed(0)
    if name == "cpu" and library.loaded() is None:
        pytest.skip(library.status())
    needs = replace(CPU, dtype=dtype, cache_dtype=dtype)
    attend = resolve_backend(name, needs)[1].load(needs)
    rtol, atol = TOLERANCES[dtype]
    for batch in BATCHES:
        metadata = make_metadata(batch, block_size=8, num_blocks=16)
        q = randn(int(metadata.query_start_loc[-1]), 3, 4, 24, dtype=dtype)[:, 1]
        args = (q, *written_caches(metadata, dtype), metadata, 24**-0.5)
        want = reference.paged_attention(*args, **FEATURES[feature])
        got = attend(*args, **FEATURES[feature])
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
        assert got.dtype == dtype


MEANINGLESS: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": 0}, "sliding_window must be 1 or more; it is 0"),
    ({"sliding_window": -3}, "sliding_window must be 1 or more; it is -3"),
    ({"soft_cap": 0.0}, "soft_cap must be above 0; it is 0.0"),
    ({"soft_cap": float("nan")}, "soft_cap must be above 0; it is nan"),
    (
        {"alibi_slopes": torch.ones(3)},
        r"alibi_slopes must be floats \[4\] on cpu; they are torch.float32 \[3\]",
    ),
    ({"attention_chunk": 0}, "attention_chunk must be 1 or more; it is 0"),
    ({"attention_chunk": 4, "sliding_window": 4}, "not both"),
    ({"sinks": torch.ones(3)}, r"sinks must be floats \[4\] on cpu; they are torch.float32 \[3\]"),
    ({"alibi_slopes": torch.ones(4).int()}, r"they are torch.int32 \[4\]"),
    ({"relative_bias": torch.ones(4, 8)}, r"relative_bias must be float32 \[4, 2 \* P - 1\]"),
    ({"alibi_slopes": torch.ones(4, device="meta")}, "on meta"),
]


@pytest.mark.parametrize(("feature", "message"), MEANINGLESS, ids=str)
@pytest.mark.parametrize("name", [name for name in known_backends() if name != "triton"])
def test_every_backend_refuses_features_that_mean_nothing(
    name: str, feature: dict[str, Any], message: str
) -> None:
    if name == "cpu" and library.loaded() is None:
        pytest.skip(library.status())
    metadata = make_metadata([(1, 9)], block_size=8, num_blocks=16)
    args = (randn(1, 4, 24), *randn_caches(16, 2, 8, 24, torch.float32), metadata, 24**-0.5)
    with pytest.raises(ValueError, match=message):
        resolve_backend(name, CPU)[1].load(CPU)(*args, **feature)


def written_caches(metadata: AttentionMetadata, dtype: torch.dtype) -> list[Tensor]:
    """Random keys and values where requests have tokens, NaN everywhere else."""
    k_cache, v_cache = randn_caches(16, 2, 8, 24, dtype)
    written = torch.zeros(16, 8, dtype=torch.bool)
    for table, length in zip(metadata.block_tables, metadata.seq_lens.tolist(), strict=True):
        positions = torch.arange(length)
        written[table[positions // 8].long(), positions % 8] = True
    k_cache.masked_fill_(~written[:, None, None, :], torch.nan)
    v_cache.masked_fill_(~written[:, None, :, None], torch.nan)
    return [k_cache, v_cache]


@pytest.mark.parametrize("name", ["cpu", "torch_sdpa", "reference"])
def test_backend_reads_a_cache_of_another_precision(name: str) -> None:
    if name == "cpu" and library.loaded() is None:
        pytest.skip(library.status())
    torch.manual_seed(0)
    metadata = make_metadata([(5, 5), (1, 20)], block_size=8, num_blocks=16)
    args = (randn(6, 4, 24), *randn_caches(16, 2, 8, 24, torch.float16), metadata, 24**-0.5)
    attend = resolve_backend(name, CPU)[1].load(CPU)
    torch.testing.assert_close(attend(*args), reference.paged_attention(*args), rtol=1e-4, atol=1e-4)


@here_only
def test_auto_is_the_best_that_can_run() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    assert resolve_backend("auto", CPU)[0] == "cpu"
    assert resolve_backend("auto", replace(CPU, head_size=20))[0] == "reference"
    assert resolve_backend("auto", GPU)[0] == "triton"
    assert resolve_backend("auto", replace(GPU, has_soft_cap=True, batch_invariant=True))[0] == "triton"


@here_only
def test_the_chosen_function_is_that_of_the_table() -> None:
    row = next(row for row in ops.paged_attention.implementations if row.name == "cpu")
    assert resolve_backend("auto", CPU)[1].load(CPU) is row.load()


def test_batch_invariance_changes_tritons_function() -> None:
    pytest.importorskip("triton", reason="no Triton for this platform")
    names = [
        resolve_backend("triton", needs)[1].load(needs).__name__
        for needs in (GPU, replace(GPU, batch_invariant=True))
    ]
    assert names == ["paged_attention", "invariant_paged_attention"]


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("flash", CPU, "must be one of auto, cpu, triton, torch_sdpa, reference, got 'flash'"),
        ("cpu", GPU, "cpu cannot be used here: it runs on cpu, and the device is cuda"),
        ("cpu", replace(CPU, head_size=20), "must be a multiple of 8, and the model's is 20"),
        ("triton", CPU, "it runs on cuda and xpu, and the device is cpu"),
        ("triton", replace(GPU, cache_dtype=torch.int8), "does not read an int8 KV cache"),
        ("torch_sdpa", replace(GPU, has_soft_cap=True), "torch's attention cannot cap"),
        ("torch_sdpa", replace(GPU, has_sinks=True), "torch's attention has no sinks"),
        ("torch_sdpa", replace(GPU, batch_invariant=True), "depend on the batch, and --batch-invariant"),
        ("reference", replace(GPU, batch_invariant=True), "depend on the batch, and --batch-invariant"),
    ],
)
def test_unusable_backend_names_its_reason(name: str, needs: AttentionNeeds, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_backend(name, needs)


@here_only
def test_refusal_names_usable_backends() -> None:
    with pytest.raises(ConfigError, match="Of the built-in ones, cpu, torch_sdpa, reference can"):
        resolve_backend("triton", CPU)


def test_auto_without_result_lists_all_reasons() -> None:
    needs = replace(GPU, device_type="mps", batch_invariant=True)
    with pytest.raises(
        ConfigError, match=r"can be used here. triton: it runs on .*; cpu: .*; reference: its sums"
    ):
        resolve_backend("auto", needs)


def test_backends_that_read_values_back_are_not_captured() -> None:
    capturable = {name: backend.capturable for name, backend in attention_backends._BUILT_IN.items()}
    assert capturable == {"cpu": True, "triton": True, "torch_sdpa": False, "reference": False}


def negative(*args: Any, **features: Any) -> Tensor:
    return -reference.paged_attention(*args, **features)


NEGATIVE = AttentionBackend(
    lambda needs: "it is for positive thinkers" if needs.has_soft_cap else None, lambda needs: negative
)


def test_a_plug_in_is_a_backend_like_any_other(offer: Offer) -> None:
    offer(BACKENDS.group, f"negative={__name__}:NEGATIVE")
    assert known_backends() == ["cpu", "triton", "torch_sdpa", "reference", "negative"]
    name, backend = resolve_backend("negative", CPU)
    assert (name, backend.load(CPU)) == ("negative", negative)
    with pytest.raises(ConfigError, match="negative cannot be used here: it is for positive thinkers"):
        resolve_backend("negative", replace(CPU, has_soft_cap=True))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["x=no.such.module:X"], "cannot be imported: No module named 'no'"),
        ([f"x={__name__}:MISSING"], "cannot be imported: .*has no attribute 'MISSING'"),
        ([f"x={__name__}:negative"], "expected: AttentionBackend"),
        ([f"x={__name__}:NEGATIVE", f"x={__name__}:negative"], "must be offered by one package"),
    ],
)
def test_a_plug_in_that_does_not_fit_is_refused(points: list[str], message: str, offer: Offer) -> None:
    offer(BACKENDS.group, *points)
    with pytest.raises(ConfigError, match=message):
        resolve_backend("x", CPU)


def test_one_object_offered_twice_is_no_conflict(offer: Offer) -> None:
    """As when a package is found both installed and in the working directory."""
    offer(BACKENDS.group, f"x={__name__}:NEGATIVE", f"x={__name__}:NEGATIVE")
    assert resolve_backend("x", CPU)[1] is NEGATIVE


def test_no_plug_in_is_imported_before_it_is_named(offer: Offer) -> None:
    offer(BACKENDS.group, "x=no.such.module:X")
    assert "x" in known_backends()
    resolve_backend("reference", CPU)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_request_without_biases_for_its_length_is_refused(name: str) -> None:
    if name == "cpu" and library.loaded() is None:
        pytest.skip(library.status())
    attend = resolve_backend(name, CPU)[1].load(CPU)
    metadata = make_metadata([(1, 20)], block_size=8, num_blocks=16)
    args = (randn(1, 4, 24), *written_caches(metadata, torch.float32), metadata, 24**-0.5)
    with pytest.raises(IndexError, match="biases for 19"):
        attend(*args, relative_bias=torch.zeros(4, 37))
