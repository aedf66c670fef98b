# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT itself has made and saved give the logits of PEFT's merged weights.

`make test-more` installs PEFT, which no change is tested with.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.lora.checkpoint import read_adapter
from quire.lora.store import AdapterSlots
from quire.lora.targets import Targets
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of
from tests.lora.test_adapters import logits
from tests.models.harness import load_tiny, logits_of
from tests.models.test_parity import assert_close, prompts

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        importlib.util.find_spec("peft") is None, reason="PEFT is not installed; make test-more does"
    ),
    pytest.mark.filterwarnings("default:::peft.*"),
]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "some modules": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "patterns": (
        "llama",
        {
            "rank_pattern": {"q_proj": 2, "down_proj": 9},
            "alpha_pattern": {"down_proj": 6, r"layers\.0\.self_attn\.q_proj": 3},
        },
    ),
    "rslora": ("llama", {"use_rslora": True}),
    "dora": ("llama", {"use_dora": True}),
    "dora of patterns": ("llama", {"use_dora": True, "use_rslora": True, "rank_pattern": {"up_proj": 7}}),
    "biases of products": ("qwen2", {"lora_bias": True, "target_modules": ["q_proj", "k_proj", "v_proj"]}),
    "biases": ("gpt2", {"bias": "lora_only"}),
    "saved head": ("llama", {"modules_to_save": ["lm_head"]}),
    "saved tables": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "trained tokens": ("llama", {"trainable_token_indices": [3, 70, 9]}),
    "qwen2": ("qwen2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3, trained tokens": ("gemma3", {"trainable_token_indices": [3, 70, 9]}),
    "phi3": ("phi3", {}),
    "qwen3moe": ("qwen3moe", {"target_parameters": EXPERTS}),
    "qwen3moe, experts alone": ("qwen3moe", {"target_modules": [], "target_parameters": EXPERTS}),
    "qwen3moe, patterns": (
        "qwen3moe",
        {"target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 2, "q_proj": 7}},
    ),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "deepseekv2": ("deepseekv2", {}),
    "mamba2": ("mamba2", {"target_modules": ["in_proj"]}),  # PEFT refuses the rest
}


def made(model_dir: Path, directory: Path, options: dict[str, Any]) -> Any:
    """PEFT's adapter of transformers' model, random and saved there, merged into it."""
    import peft

    torch.manual_seed(0)
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    model = peft.get_peft_model(oracle_of(model_dir), peft.LoraConfig(**settings)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(directory, save_embedding_layers=False)
    return model.merge_and_unload()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_pefts_merged_model(
    case: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    name, options = CASES[case]
    sequences = prompts((1, 5, 17))
    merged = made(tiny_model(name), tmp_path, options)
    model = load_tiny(tiny_model(name))
    targets = Targets(model)
    slots = AdapterSlots(targets, 2, 16, torch.float32, torch.device("cpu"), max_rows=VOCAB_SIZE)
    slots.put(1, read_adapter(tmp_path, targets, 16, torch.float32, max_rows=VOCAB_SIZE))
    expected, plain = logits(merged, sequences), logits(oracle_of(tiny_model(name)), sequences)
    assert min((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.01
    assert_close(logits_of(model, sequences, chunk_sizes=[3, 1, 7], adapters=[1, 1, 1]), expected)
    mixed = logits_of(model, sequences, chunk_sizes=[5], adapters=[-1, 1, 0])
    assert_close(mixed, [plain[0], expected[1], plain[2]])
