# SPDX-License-Identifier: Apache-2.0
"""Adapters in integers of 8 bits: what they stand for is near what was rounded, and is what is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.low_rank import LowRankStacks
from quire.lora.checkpoint import read_adapter
from quire.lora.modules import quantize_adapter
from quire.lora.store import AdapterSlots
from quire.lora.targets import Targets
from tests.fixtures.tiny_models import oracle_of
from tests.kernels.op_cases import low_rank_stacks
from tests.lora.adapters import linear_shapes, write_adapter
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import prompts

PARTS, INPUTS = [40, 3, 77], 50


def product(stacks: LowRankStacks, slot: int, part: int) -> Tensor:
    """Return the output that a part of an adapter adds for each input, [K, N of the part]."""
    rank = int(stacks.ranks[slot, part])
    first = stacks.a[slot, part, :, :rank].float() * stacks.scales[slot, part, :rank]
    return first @ stacks.b[slot, :rank, stacks.columns()[part]].float()


def test_adapter_error_is_bounded_by_both_quantization_steps() -> None:
    torch.manual_seed(0)
    exact = low_rank_stacks(4, PARTS, INPUTS, 16)
    exact.scales.copy_(torch.rand(4, len(PARTS), 1).expand_as(exact.scales))
    integers = quantize_adapter(exact, torch.int8)
    assert (integers.a.dtype, integers.b.dtype) == (torch.int8, torch.int8)
    assert 2 * integers.nbytes < exact.nbytes
    for slot in range(4):
        for part, columns in enumerate(exact.columns()):
            rank = int(exact.ranks[slot, part])
            a, b = exact.a[slot, part, :, :rank], exact.b[slot, :rank, columns]
            of_a, of_b = (m.abs().amax(dim, keepdim=True) / 127 for m, dim in ((a, 0), (b, 1)))
            most = (of_a / 2) @ (b.abs() + of_b / 2) + a.abs() @ (of_b / 2).expand_as(b)
            off = (product(integers, slot, part) - product(exact, slot, part)).abs()
            assert bool((off <= exact.scales[slot, part, 0] * most + 1e-6).all())


def test_zero_adapter_stays_zero() -> None:
    empty = LowRankStacks.empty(1, (8, 4), 6, 16, torch.float32, torch.device("cpu"))
    empty.ranks.fill_(5)
    empty.scales.fill_(2.0)
    integers = quantize_adapter(empty, torch.int8)
    assert bool(integers.scales.isfinite().all())
    out = torch.ones(1, 12)
    ops.low_rank_linear(out, torch.ones(1, 6), torch.zeros(1, dtype=torch.int32), integers)
    assert bool((out == 1).all())


def test_floats_are_left_as_they_are() -> None:
    stacks = low_rank_stacks(1, PARTS, INPUTS, 16, torch.bfloat16)
    assert quantize_adapter(stacks, torch.bfloat16) is stacks


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {}), ("llama", {"use_dora": True}), ("qwen3moe", {}), ("deepseekv2", {})],
    ids=str,
)
def test_logits_are_near_those_of_the_adapter(
    name: str, config: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """At most a twentieth of an adapter's change is lost, also if a small change selects other experts."""
    model = load_tiny(tiny_model(name))
    targets = Targets(model)
    shapes = {module: (target.outputs, target.inputs) for module, target in targets.modules.items()}
    shapes = {module: shape for module, shape in shapes.items() if not config or module != "lm_head"}
    directory = write_adapter(tmp_path, shapes, **config)
    sequences, found = prompts((5, 9)), []
    for dtype in (torch.float32, torch.int8):
        slots = AdapterSlots(targets, 1, 16, dtype, torch.device("cpu"))
        adapter = read_adapter(directory, targets, 16, dtype)
        slots.put(0, adapter)
        found.append(torch.cat(logits_of(model, sequences, chunk_sizes=[4], adapters=[0, 0])))
    exact, near = found
    changed = exact - torch.cat(logits_of(model, sequences, chunk_sizes=[4]))
    assert 0 < float((near - exact).norm()) < float(changed.norm()) / 20


def test_engine_with_quantized_adapters_has_bits_of_rows_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    adapters = [
        LoRARequest(str(number), number, str(write_adapter(tmp_path / str(number), shapes, seed=number)))
        for number in (1, 2)
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    found: dict[str, list[float]] = {}
    for dtype in ("auto", "int8"):
        llm = LLM(
            str(tiny_model("llama")),
            enable_lora=True,
            max_loras=2,
            lora_dtype=dtype,
            max_model_len=64,
            device="cpu",
        )
        chosen = [adapters[0], None, adapters[1]]
        together = llm.generate([[3, 1, 4]] * 3, params, lora_request=chosen, use_tqdm=False)
        alone = [llm.generate([[3, 1, 4]], params, lora_request=one, use_tqdm=False)[0] for one in chosen]
        assert [output.outputs[0].logprobs for output in together] == [
            output.outputs[0].logprobs for output in alone
        ]
        found[dtype] = [output.outputs[0].cumulative_logprob or 0.0 for output in together]
    exact, near = found["auto"], found["int8"]
    assert near[1] == exact[1]
    assert near[0] != exact[0]


def test_ranks_with_the_same_bits_want_floats(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="--tp-invariant requires another --lora-dtype than int8"):
        LLM(str(tiny_model("llama")), enable_lora=True, lora_dtype="int8", tp_invariant=True, device="cpu")
