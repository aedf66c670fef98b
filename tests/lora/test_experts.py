# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts: what they add is what merging them adds, and no row learns of another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ModelLoadError
from quire.inputs import PromptType
from quire.lora.checkpoint import read_adapter
from quire.lora.peft_config import WEIGHTS_NAME
from quire.lora.targets import Targets
from tests.end_to_end.test_determinism import result_of
from tests.fixtures.quick import quick_models
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import extend, write_adapter
from tests.lora.test_adapters import logits, with_slots
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import assert_close, prompts

QUICK = ["mixtral", "gptoss", "nemotronh"]
OTHERS = [
    "llama4", "qwen3moe",
    "afmoe-trinity", "deepseekv2", "deepseekv3", "dots1", "erniemoe", "exaonemoe", "flexolmo", "glm4moe", "granite4",
    "granitemoe", "granitemoeshared", "hunyuanmoe", "jamba", "lfm2moe", "minimax", "minimaxm2", "nemotronh-latent",
    "olmoe", "phimoe", "bailinghybrid",
    "qwen2moe", "qwen3.5moe", "qwen3next", "solaropen",
]  # fmt: skip
SCALE = 2.0
ENDS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")


def parameters_of(oracle: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters in which transformers has the experts of a layer."""
    return {name: value for name, value in oracle.named_parameters() if name.endswith(ENDS)}


def write_stacked(directory: Path, oracle: torch.nn.Module, *, rank: int = 4, seed: int = 0) -> Path:
    """An adapter of all experts, as PEFT has it: the second parameter of a module is around the first."""
    write_adapter(directory, {}, rank=rank, target_parameters=["experts"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in parameters_of(oracle).items():
        experts, _, parameter = name.rpartition(".")
        path = experts + ("" if parameter == "down_proj" else ".base_layer")
        count, *sizes = value.shape
        outputs, inputs = sizes[::-1] if is_said_to_be_transposed(oracle, experts) else sizes
        a = torch.randn(count * rank, inputs, generator=generator) / inputs**0.5
        tensors |= {f"{path}.lora_A.weight": a}
        tensors |= {f"{path}.lora_B.weight": torch.randn(outputs, rank * count, generator=generator) / 16}
    return extend(directory, tensors)


def is_said_to_be_transposed(oracle: torch.nn.Module, experts: str) -> bool:
    return bool(getattr(oracle.get_submodule(experts), "is_transposed", False))


def merge_stacked(oracle: torch.nn.Module, directory: Path) -> Any:
    """Add to each parameter what PEFT says that it is changed by."""
    tensors = load_file(directory / WEIGHTS_NAME)
    for name, value in parameters_of(oracle).items():
        experts, _, parameter = name.rpartition(".")
        path = f"base_model.model.{experts}" + ("" if parameter == "down_proj" else ".base_layer")
        count = len(value)
        a = tensors[f"{path}.lora_A.weight"].unflatten(0, (count, -1))
        b = tensors[f"{path}.lora_B.weight"].unflatten(1, (-1, count))
        delta = torch.einsum("ore,eri->eoi", b, a)
        with torch.no_grad():
            value += SCALE * (delta.mT if is_said_to_be_transposed(oracle, experts) else delta)
    return oracle


@pytest.mark.parametrize("name", quick_models([*QUICK, *OTHERS], QUICK))
def test_logits_equal_those_of_merged_experts(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    sequences = prompts((1, 5, 17))
    model, targets, slots = with_slots(tiny_model(name))
    adapter = write_stacked(tmp_path, oracle_of(tiny_model(name)))
    slots.put(1, read_adapter(adapter, targets, 16, torch.float32))
    plain = logits(oracle_of(tiny_model(name)), sequences)
    expected = logits(merge_stacked(oracle_of(tiny_model(name)), adapter), sequences)
    assert max((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.01
    assert_close(logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=[1, 1, 1]), expected)
    mixed = logits_of(model, sequences, chunk_sizes=[5], adapters=[-1, 1, 0])
    assert_close(mixed, [plain[0], expected[1], plain[2]])


def of_each_expert(name: str, tiny_model: Callable[[str], Path]) -> dict[str, tuple[int, int]]:
    """The experts' linear modules of a checkpoint that has them apart."""
    _, targets, _ = with_slots(tiny_model(name))
    return {
        module: (target.outputs, target.inputs)
        for module, target in targets.modules.items()
        if ".experts." in module
    }


@pytest.mark.parametrize("config", [{}, pytest.param({"use_dora": True}, marks=pytest.mark.more)], ids=str)
def test_modules_of_single_experts_equal_merged_ones(
    config: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As PEFT wrote them for a transformers in which experts were modules."""
    shapes, sequences = of_each_expert("mixtral", tiny_model), prompts((9, 4))
    adapter = write_adapter(tmp_path, shapes, **config)
    tensors = load_file(adapter / WEIGHTS_NAME)
    model, targets, slots = with_slots(tiny_model("mixtral"))
    slots.put(2, read_adapter(adapter, targets, 16, torch.float32))
    oracle = oracle_of(tiny_model("mixtral"))
    inner = oracle.config.intermediate_size
    for module in shapes:
        path, _, rest = module.replace("block_sparse_moe", "mlp").partition(".experts.")
        expert, leaf = rest.split(".")
        parameters: Any = oracle.get_submodule(f"{path}.experts")
        whole = parameters.down_proj if leaf == "w2" else parameters.gate_up_proj
        rows = {"w1": slice(0, inner), "w3": slice(inner, None), "w2": slice(None)}[leaf]
        a, b = (tensors[f"base_model.model.{module}.lora_{end}.weight"] for end in "AB")
        with torch.no_grad():
            changed = whole[int(expert)][rows] + SCALE * b @ a
            if config:
                magnitude = tensors[f"base_model.model.{module}.lora_magnitude_vector"]
                changed *= (magnitude / changed.norm(dim=1))[:, None]
            whole[int(expert)][rows] = changed
    assert_close(logits_of(model, sequences, chunk_sizes=[4], adapters=[2, 2]), logits(oracle, sequences))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3moe", "int8"),
        *(pytest.param("qwen3moe", kind, marks=pytest.mark.more) for kind in (None, "int4")),
        *(pytest.param("gptoss", kind, marks=pytest.mark.more) for kind in (None, "int8", "int4")),
    ],
)
def test_adapters_in_a_mixed_batch_match_each_alone(
    name: str, quantization: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, targets, slots = with_slots(tiny_model(name), quantization=quantization)
    plain, _, _ = with_slots(tiny_model(name), quantization=quantization)
    for slot in range(3):
        adapter = write_stacked(
            tmp_path / str(slot), oracle_of(tiny_model(name)), rank=(1, 4, 16)[slot], seed=slot
        )
        slots.put(slot, read_adapter(adapter, targets, 16, torch.float32))
    sequences, adapters = prompts((1, 4, 5, 17, 3, 9)), [2, -1, 0, 1, 1, -1]
    together = logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=adapters)
    without = logits_of(plain, sequences, chunk_sizes=[4])
    for sequence, own, mixed, base in zip(sequences, adapters, together, without, strict=True):
        assert torch.equal(logits_of(model, [sequence], chunk_sizes=[5], adapters=[own])[0], mixed)
        assert torch.equal(mixed, base) == (own < 0)


def test_requests_match_those_alone_recorded_and_eager(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    oracle = oracle_of(tiny_model("qwen3moe"))
    paths = [write_stacked(tmp_path / str(seed), oracle, seed=seed) for seed in range(2)]
    first, second = (LoRARequest(f"a{n}", n + 1, str(path)) for n, path in enumerate(paths))
    each, params = [first, None, second, first], SamplingParams(temperature=0.0, max_tokens=5, logprobs=2)
    options: dict[str, Any] = {"max_model_len": 64, "cpu_threads": 1, "enable_lora": True, "max_loras": 2}
    tokens: list[PromptType] = [{"prompt_token_ids": prompt} for prompt in prompts((3, 9, 5, 9))]

    def answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[Any]:
        found = llm.generate(tokens, params, lora_request=adapters, use_tqdm=False)
        return [result_of(output) for output in found]

    llm = LLM(str(tiny_model("qwen3moe")), **options)
    together = answers(llm, each)
    for adapter in (first, second, None):
        alone = answers(llm, [adapter] * 4)
        assert [one == other for one, other in zip(together, alone, strict=True)] == [
            own is adapter for own in each
        ]
    assert answers(LLM(str(tiny_model("qwen3moe")), enforce_eager=True, **options), each) == together


E = "base_model.model.model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def whole(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Targets, dict[str, Tensor]]:
    """Return the adapter targets of a model, and the tensors of an adapter that fits."""
    model = tiny_model("qwen3moe")
    adapter = write_stacked(tmp_path_factory.mktemp("whole"), oracle_of(model))
    return Targets(load_tiny(model)), load_file(adapter / WEIGHTS_NAME)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({f"{E}.lora_A.weight": torch.ones(33, 48)}, "has shape [33, 48], its partner [64, 32]; the model"),
        ({f"{E}.lora_B.weight": torch.ones(63, 32)}, "its partner [63, 32]; the model has 8 experts"),
        ({f"{E}.lora_B.weight": None}, f"has no partner {E}.lora_B.weight"),
        ({f"{E}.lora_magnitude_vector": torch.ones(64)}, "is for experts, which support only lora_A and lora_B"),
        ({f"{E}.lora_A.weight": torch.ones(32, 48).int()}, "is int32; adapters are floats"),
        (
            {f"{E}.lora_A.weight": torch.ones(16, 48), f"{E}.lora_B.weight": torch.ones(64, 16)},
            "has rank 2 for each of 8 experts, adapter_config.json says 4",
        ),
        (
            {f"{E}.lora_A.weight": torch.ones(136, 48), f"{E}.lora_B.weight": torch.ones(64, 136)},
            "has rank 17 for each of 8 experts; --max-lora-rank is 16",
        ),
    ],
    ids=["ranks", "outputs", "alone", "magnitude", "integers", "config", "limit"],
)  # fmt: skip
def test_mismatched_adapter_tensor_is_named(
    change: dict[str, Tensor | None], problem: str, whole: tuple[Targets, dict[str, Tensor]], tmp_path: Path
) -> None:
    targets, good = whole
    adapter = write_adapter(tmp_path, {})
    tensors = {name: tensor for name, tensor in (good | change).items() if tensor is not None}
    save_file(tensors, adapter / WEIGHTS_NAME)
    with pytest.raises(ModelLoadError) as caught:
        read_adapter(adapter, targets, 16, torch.float32)
    message = str(caught.value).replace(str(tmp_path) + "/", "")
    assert message.startswith(f"{WEIGHTS_NAME}: tensor '{E}.")
    assert problem in message
