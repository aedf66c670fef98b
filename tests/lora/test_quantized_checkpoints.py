# SPDX-License-Identifier: Apache-2.0
"""Adapters over checkpoints that are quantized already: they are added to what the files' numbers stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.lora.checkpoint import read_adapter
from tests.lora.adapters import merged_oracle, write_adapter
from tests.lora.test_adapters import logits, target_shapes, with_slots
from tests.models.harness import logits_of
from tests.models.quantized.checkpoints import Writer, write
from tests.models.quantized.test_awq import CONFIG as AWQ
from tests.models.quantized.test_awq import in_groups as awq
from tests.models.quantized.test_gptq import Writer as Gptq
from tests.models.quantized.test_published_encodings import compressed, fp8, group, int8
from tests.models.test_parity import assert_close, prompts

ROUNDED = group(num_bits=8, strategy="channel") | {
    "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}
}
CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": (Gptq(4, 16).config(), Gptq(4, 16)),
    "gptq in any order": (Gptq(4, 16, reordered=True).config(), Gptq(4, 16, reordered=True)),
    "awq": (AWQ | {"group_size": 16}, awq(16)),
    "fp8": ({"quant_method": "fp8"}, fp8(0, scalar=True)),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        fp8(16, 16, name="weight_scale_inv"),
    ),
}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_merged_weights(
    case: tuple[dict[str, Any], Writer], dora: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config, writer = case
    quantized, floats = write(tiny_model("llama"), tmp_path, config, writer, lambda name: name != "lm_head")
    sequences = prompts((1, 5, 17))
    precise = {"quantization_config": {"mode": "precise"}}
    model, targets, slots = with_slots(quantized, **precise)
    adapter = write_adapter(tmp_path / "a", target_shapes(floats, targets, tables=not dora), use_dora=dora)
    slots.put(1, read_adapter(adapter, targets, 16, torch.float32))
    expected = logits(merged_oracle(floats, adapter), sequences)
    plain = logits_of(model, sequences, chunk_sizes=[5], adapters=[0, 2, -1])
    assert min((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.01
    assert_close(logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=[1, 1, 1]), expected)
    without, _, _ = with_slots(quantized, **precise)
    for one, other in zip(logits_of(without, sequences, chunk_sizes=[5]), plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["fast", "precise", "checkpoint"])
def test_requests_of_a_mixed_batch_match_each_alone(
    mode: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config = compressed("int-quantized", ROUNDED)
    path, floats = write(tiny_model("llama"), tmp_path, config, int8(1), lambda name: name != "lm_head")
    model, targets, slots = with_slots(path, quantization_config={"mode": mode})
    shapes, adapters = target_shapes(floats, targets), [1, -1, 0]
    for slot in range(2):
        adapter = write_adapter(tmp_path / str(slot), shapes, seed=slot)
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    sequences = prompts((1, 5, 17))
    together = logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=adapters)
    for sequence, own, mixed in zip(sequences, adapters, together, strict=True):
        assert torch.equal(logits_of(model, [sequence], chunk_sizes=[5], adapters=[own])[0], mixed)
