# SPDX-License-Identifier: Apache-2.0
"""Adapters on models: what they add is what merging them adds, and no row learns of another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels import reference
from quire.layers.linear import Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.step import StepContext
from quire.lora.checkpoint import read_adapter
from quire.lora.store import AdapterSlots
from quire.lora.targets import Targets
from quire.models.base import CausalLM
from tests.fixtures.hosted_models import HOSTED
from tests.fixtures.multimodal import MULTIMODAL
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.tiny_families import TINY_FAMILIES
from tests.fixtures.tiny_models import TINY_MODELS, oracle_of
from tests.lora.adapters import extend, linear_shapes, merged_oracle, table_shapes, write_adapter
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import assert_close, prompts

FAMILIES = ["llama", "qwen2", "phi3", "gemma3", "gpt2", "opt"]
OTHERS = sorted((TINY_MODELS.keys() | TINY_FAMILIES.keys()) - {*FAMILIES, "phi3-longrope"})
NOT_TARGETS = ("router", "gate")
"""Ends of the names of linear modules that no adapter may change."""
CPU = torch.device("cpu")


def with_slots(model_dir: Path, num_slots: int = 3, **args: Any) -> tuple[CausalLM, Targets, AdapterSlots]:
    model = load_tiny(model_dir, **args)
    targets = Targets(model)
    return model, targets, AdapterSlots(targets, num_slots, 16, torch.float32, CPU)


def target_shapes(model_dir: Path, targets: Targets, tables: bool = True) -> dict[str, tuple[int, int]]:
    """All modules of transformers' model that adapters can change."""
    oracle = oracle_of(model_dir)
    shapes = linear_shapes(oracle) | (table_shapes(oracle) if tables else {})
    return {name: shape for name, shape in shapes.items() if targets.name_of(name) in targets.modules}


@torch.inference_mode()
def logits(oracle: Any, sequences: list[list[int]]) -> list[Tensor]:
    return [oracle(torch.tensor([sequence])).logits[0] for sequence in sequences]


@pytest.mark.parametrize("name", quick_models([*FAMILIES, *OTHERS], FAMILIES))
def test_logits_equal_those_of_merged_weights(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    sequences = prompts((1, 5, 17))
    model, targets, slots = with_slots(tiny_model(name))
    oracle = oracle_of(tiny_model(name))
    shapes = linear_shapes(oracle) | table_shapes(oracle)
    left = {module for module in shapes if targets.name_of(module) not in targets.modules}
    left = {module for module in left if not targets.is_idle(module)}  # which change nothing
    assert all(module.endswith(NOT_TARGETS) for module in left), left
    adapter = write_adapter(tmp_path / "a", {n: shape for n, shape in shapes.items() if n not in left})
    slots.put(1, read_adapter(adapter, targets, 16, torch.float32))
    expected = logits(merged_oracle(tiny_model(name), adapter), sequences)
    plain = logits(oracle_of(tiny_model(name)), sequences)
    assert min((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.01
    assert_close(logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=[1, 1, 1]), expected)
    assert_close(logits_of(model, sequences, chunk_sizes=[5], adapters=[-1, 1, -1])[1:2], expected[1:2])
    assert_close(logits_of(model, sequences, chunk_sizes=[5], adapters=[0, 2, -1]), plain)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_adapters_in_a_mixed_batch_match_each_alone(
    name: str, quantization: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model(name), quantization=quantization)
    shapes, adapters = target_shapes(tiny_model(name), targets), [2, -1, 0, 1, 1, -1]
    for slot in range(3):
        adapter = write_adapter(tmp_path / str(slot), shapes, rank=(1, 4, 16)[slot], seed=slot)
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    sequences = prompts((1, 4, 5, 17, 3, 9))
    together = logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=adapters)
    without = logits_of(model, sequences, chunk_sizes=[4])
    for sequence, own, mixed, base in zip(sequences, adapters, together, without, strict=True):
        assert torch.equal(logits_of(model, [sequence], chunk_sizes=[5], adapters=[own])[0], mixed)
        assert torch.equal(mixed, base) == (own < 0)


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model."])
def test_an_adapter_may_name_modules_of_the_whole_model(
    beginning: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model("with-eyes-qwen2.5"))
    shapes = {name: (target.outputs, target.inputs) for name, target in targets.modules.items()}
    named = {name.replace("model.", beginning, 1): shape for name, shape in shapes.items()}
    for slot, modules in enumerate((shapes, named)):
        adapter = write_adapter(tmp_path / str(slot), modules)
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    alone, by_whole, without = logits_of(model, prompts((9,)) * 3, chunk_sizes=[4], adapters=[0, 1, -1])
    assert torch.equal(alone, by_whole)
    assert not torch.equal(alone, without)


@pytest.mark.parametrize("name", quick(MULTIMODAL, ["with-eyes-mistral3"]))
def test_adapter_of_towers_too_equals_that_of_the_text(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, targets, slots = with_slots(tiny_model(name))
    own = {name: (target.outputs, target.inputs) for name, target in targets.modules.items()}
    text = {"model.language_model." + name.removeprefix("model."): own[name] for name in own}
    text = {name: shape for name, shape in text.items() if "lm_head" not in name and "embed" not in name}
    shapes = linear_shapes(oracle_of(tiny_model(name)))
    towers = {name: shape for name, shape in shapes.items() if targets.is_left_out(name)}
    assert "lm_head" not in towers
    for slot, modules in enumerate((text, text | towers)):
        adapter = write_adapter(tmp_path / str(slot), modules)
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    whole = {f"{next(iter(towers))}.{end}": torch.ones(3) for end in ("bias", "norm.weight", "anything")}
    slots.put(2, read_adapter(extend(tmp_path / "1", whole), targets, 16, torch.float32))
    found = logits_of(model, prompts((9,)) * 4, chunk_sizes=[4], adapters=[0, 1, 2, -1])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    assert caplog.text.count("for parts of the model that are not served") == 2
    with pytest.raises(ModelLoadError, match="no tensors for a served part of the model"):
        read_adapter(write_adapter(tmp_path / "t", towers), targets, 16, torch.float32)


def test_patterns_and_stabilized_ranks_set_the_scale(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    _, targets, _ = with_slots(tiny_model("llama"))
    shapes = target_shapes(tiny_model("llama"), targets)
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2, "down_proj": 9},
        "alpha_pattern": {"down_proj": 6.0},
    }
    sequences = prompts((9,))
    for stabilized, scales in (
        (False, {"q_proj": 8 / 2, "down_proj": 6 / 9}),
        (True, {"q_proj": 8 / 2**0.5, "down_proj": 6 / 3, "": 8 / 2}),
    ):
        adapter = write_adapter(tmp_path / str(stabilized), shapes, use_rslora=stabilized, **patterns)
        model, targets, slots = with_slots(tiny_model("llama"))
        slots.put(0, read_adapter(adapter, targets, 16, torch.float32))
        expected = logits(merged_oracle(tiny_model("llama"), adapter, scales), sequences)
        assert_close(logits_of(model, sequences, chunk_sizes=[4], adapters=[0]), expected)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"use_dora": True}),
        ("phi3", {"use_dora": True}),
        ("gpt2", {"use_dora": True, "bias": "all"}),
        ("deepseekv2", {"use_dora": True}),
        ("llama", {"lora_bias": True}),
    ],
    ids=str,
)
def test_magnitudes_and_biases_equal_merged_weights(
    name: str, config: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model(name))
    shapes = target_shapes(tiny_model(name), targets, tables="use_dora" in config)
    if "bias" in config:
        del shapes["lm_head"]  # which has none
    adapter = write_adapter(tmp_path, shapes, **config)
    slots.put(1, read_adapter(adapter, targets, 16, torch.float32))
    sequences = prompts((1, 9))
    expected = logits(merged_oracle(tiny_model(name), adapter), sequences)
    assert_close(logits_of(model, sequences, chunk_sizes=[4], adapters=[1, 1]), expected)
    mixed = logits_of(model, sequences, chunk_sizes=[4], adapters=[-1, 1])
    assert_close(mixed, [*logits(oracle_of(tiny_model(name)), sequences[:1]), expected[1]])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "phi3", "qwen2"])
def test_dora_magnitudes_use_the_dequantized_weights(
    name: str, quantization: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """m / |W + P| by rows times W x + P x, and the bias, layer by layer; W x is what the layer makes of it."""
    _, targets, slots = with_slots(tiny_model(name), quantization=quantization, enable_lora=True)
    shapes = linear_shapes(oracle_of(tiny_model(name)))
    shapes = {module: shape for module, shape in shapes.items() if module != "lm_head"}
    adapter = write_adapter(tmp_path, shapes, use_dora=True)
    slots.put(2, read_adapter(adapter, targets, 16, torch.float32))
    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.manual_seed(0)
    for module, target in ((module, targets.modules[module]) for module in shapes):
        a, b, m = (
            tensors[f"base_model.model.{module}.{end}"]
            for end in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        for place in target.places:
            layer, here, rows = targets.layers[place.layer].layer, place.piece.place, place.piece.rows
            assert isinstance(layer, Linear)
            x = torch.randn(3, layer.inputs)
            weight = reference.unpack_weight(layer.matrix())[here]
            bias = 0 if layer.bias is None else layer.bias[here]
            product = 2.0 * b[rows] @ a
            base = layer.sums(x, StepContext(()))[:, here] - bias
            expected = m[rows] / (weight + product).norm(dim=1) * (base + x @ product.t()) + bias
            adapter_rows = torch.full((3,), 2, dtype=torch.int32)
            got = layer.sums(x, StepContext((), adapter_rows))[:, here]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_slot_keeps_nothing_of_its_last_adapter(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, targets, slots = with_slots(tiny_model("llama"))
    shapes = target_shapes(tiny_model("llama"), targets)
    some = {name: shape for name, shape in shapes.items() if name.endswith(("q_proj", "up_proj"))}
    large = read_adapter(write_adapter(tmp_path / "large", shapes, rank=16), targets, 16, torch.float32)
    small = read_adapter(write_adapter(tmp_path / "small", some, rank=2, seed=1), targets, 16, torch.float32)
    linear = target_shapes(tiny_model("llama"), targets, tables=False)
    dora = write_adapter(tmp_path / "dora", linear, use_dora=True)
    sequences = prompts((7,))
    slots.put(0, small)
    fresh = logits_of(model, sequences, chunk_sizes=[4], adapters=[0])[0]
    slots.put(1, large)
    slots.put(1, read_adapter(dora, targets, 16, torch.float32))
    slots.put(1, small)
    assert torch.equal(logits_of(model, sequences, chunk_sizes=[4], adapters=[1])[0], fresh)


HOSTED_TABLES = ("lm_head", "embed_tokens", "decoder", "output_projection", "proj_out")


@pytest.mark.parametrize("name", quick_models(sorted(HOSTED), ["biogpt", "bert", "gemma4-unified", "laguna"]))
def test_transformers_backend_adapter_equals_merging(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """To all linear layers that see the rows of the step as they come; tables, heads and routers stay as they are.

    What sees or hears is not there.
    """
    sequences, limits = prompts((1, 5, 17)), {"model_impl": "transformers", "max_model_len": 64}
    model, targets, slots = with_slots(tiny_model(name), enable_lora=True, **limits)
    shapes = linear_shapes(oracle_of(tiny_model(name)))
    taken = {module: shape for module, shape in shapes.items() if targets.name_of(module) in targets.modules}
    assert len(taken) >= 4 * model.config.arch.num_layers
    others = ("proj", "gate", "router", "router.classifier", *HOSTED_TABLES)
    left = [module for module in shapes.keys() - taken.keys() if "_embed." not in module]
    assert all(module.endswith(others) for module in left), left
    adapter = write_adapter(tmp_path, taken)
    slots.put(1, read_adapter(adapter, targets, 16, torch.float32))
    expected = logits(merged_oracle(tiny_model(name), adapter), sequences)
    plain = logits(oracle_of(tiny_model(name)), sequences)
    assert min((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.01
    mixed = logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=[1, -1, 1])
    assert_close(mixed, [expected[0], plain[1], expected[2]])


@pytest.mark.parametrize("name", ["bert", "biogpt"])
def test_bits_of_rows_of_transformers_code_are_their_own(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"model_impl": "transformers", "max_model_len": 64, "enable_lora": True}
    model, targets, slots = with_slots(tiny_model(name), **limits)
    for slot in range(2):
        adapter = write_adapter(tmp_path / str(slot), target_shapes(tiny_model(name), targets), seed=slot)
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    sequences, adapters = prompts((1, 5, 17)), [1, -1, 0]
    together = logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=adapters)
    for sequence, own, mixed in zip(sequences, adapters, together, strict=True):
        assert torch.equal(logits_of(model, [sequence], chunk_sizes=[5], adapters=[own])[0], mixed)


def test_experts_of_transformers_loops_are_no_targets(tiny_model: Callable[[str], Path]) -> None:
    """Experts of transformers' own loops would have adapters of other rows."""
    model = load_tiny(tiny_model("laguna"), model_impl="transformers", max_model_len=64, enable_lora=True)
    assert any(".experts." in name for names, _ in model.checkpoint_layers() for name in names)
    assert not any(".experts." in name for name in Targets(model).modules)
    without = load_tiny(tiny_model("biogpt"), max_model_len=64)
    assert any(isinstance(layer, MatrixLayer) for _, layer in without.checkpoint_layers())
    assert not Targets(without).modules, "an engine without adapters takes no notes"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_slot_of_heads_forgets_the_lengths_that_it_had(
    quantization: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model("deepseekv2"), quantization=quantization)
    shapes = {
        name: (target.outputs, target.inputs)
        for name, target in targets.modules.items()
        if name.endswith("kv_b_proj")
    }
    plain, dora = (
        read_adapter(
            write_adapter(tmp_path / str(is_dora), shapes, use_dora=is_dora), targets, 16, torch.float32
        )
        for is_dora in (False, True)
    )
    sequences, found = prompts((7,)), []
    for adapter in (plain, dora, plain):
        slots.put(1, adapter)
        found += logits_of(model, sequences, chunk_sizes=[4], adapters=[1])
    assert torch.equal(found[0], found[2])
    assert (found[0] - found[1]).abs().max() > 0.01
    head = targets.modules["lm_head"]
    path = write_adapter(tmp_path / "head", {"lm_head": (head.outputs, head.inputs)})
    of_head = read_adapter(path, targets, 16, torch.float32)
    for slot, adapter in ((1, dora), (1, of_head), (2, of_head)):
        slots.put(slot, adapter)
    after, fresh = logits_of(model, sequences * 2, chunk_sizes=[4], adapters=[1, 2])
    assert torch.equal(after, fresh)
