# SPDX-License-Identifier: Apache-2.0
"""Checks that no kernel is compiled once an engine has started, for every kind of engine that has kernels of its own.

The models of other kinds are small, and of sizes that kernels like; what is launched depends on their parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import engine, greedy
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.target import Target
from quire.adapters import LoRARequest
from quire.kernels.triton.launch import watch_compiles

_SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_EXPERTS = _SIZES | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_LATENTS = _SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_STATES = _SIZES | {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [1],
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
}
_ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "min_p": 0.1, "presence_penalty": 0.5},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"logprobs": 20, "logit_bias": {5: 1.0}},
)
"""What requests want, one after the other of all prompts."""


@dataclass(frozen=True)
class _Kind:
    args: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    config: dict[str, Any] | None = None
    """Of a model of its own; None: the shape's."""
    needs_gpu: bool = False


KINDS = {
    "as it is": _Kind(),
    "int8": _Kind({"quantization": "int8"}),
    "int4": _Kind({"quantization": "int4"}),
    "fp8": _Kind({"quantization": "fp8"}, needs_gpu=True),
    "fp8 KV cache": _Kind({"kv_cache_dtype": "fp8"}, needs_gpu=True),
    "batch-invariant": _Kind({"batch_invariant": True}, needs_gpu=True),
    "processed logprobs": _Kind({"logprobs_mode": "processed_logprobs"}),
    "guesses": _Kind({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}),
    "LoRA": _Kind({"enable_lora": True}),
    "experts": _Kind(config=_EXPERTS),
    "latents": _Kind(config=_LATENTS),
    "states": _Kind(config=_STATES),
}
"""Engines that launch what others do not."""


def checks(
    target: Target, shape: Shape, prompts: list[list[int]], limits: dict[str, Any], scratch: Path
) -> Iterator[Check]:
    """Yield the checks for a model of the shape, and for others, with these limits."""
    for name, kind in KINDS.items():
        if target.is_gpu or not kind.needs_gpu:
            run = partial(_late_kernels, target, shape, prompts, limits, scratch, name)
            of = shape.name if kind.config is None else "small model"
            yield Check(f"{of}: no kernel compiled after start, {name}", run)


def _late_kernels(
    target: Target,
    shape: Shape,
    prompts: list[list[int]],
    limits: dict[str, Any],
    scratch: Path,
    name: str,
) -> float:
    """Raises with their names, if there are any."""
    kind, names = KINDS[name], list[str]()
    directory = _directory(shape, kind, scratch / name)
    adapter = _adapter(shape, scratch / "adapter") if "enable_lora" in kind.args else None
    # Half of the requests, so that steps have rows with and without.
    adapters = [adapter if index % 2 == 0 else None for index in range(len(prompts))]
    if kind.config is not None:
        prompts = [[token % _SIZES["vocab_size"] for token in prompt] for prompt in prompts]
    with engine(target, directory, **limits | kind.args | {"async_scheduling": True}) as running:
        watch_compiles(names.append)
        try:
            for params in _ASKED:
                running.generate(prompts, greedy(8, **params), adapters)
        finally:
            watch_compiles(None)
    if names:
        raise RuntimeError(f"compiled after start: {', '.join(names)}")
    return 0.0


def _directory(shape: Shape, kind: _Kind, directory: Path) -> Path:
    """A model directory without weights."""
    shape.write(directory)
    if kind.config is not None:
        (directory / "config.json").write_text(json.dumps(kind.config))
    return directory


def _adapter(shape: Shape, directory: Path) -> LoRARequest:
    """One of some linears of each layer."""
    from tests.lora.adapters import write_adapter

    rows = {"q": shape.heads * shape.head_size, "v": shape.kv_heads * shape.head_size}
    modules = {
        f"model.layers.{layer}.self_attn.{part}_proj": (size, shape.hidden)
        for layer in range(shape.num_layers)
        for part, size in rows.items()
    }
    modules |= {
        f"model.layers.{layer}.mlp.down_proj": (shape.hidden, shape.intermediate)
        for layer in range(shape.num_layers)
    }
    return LoRARequest("adapter", 1, str(write_adapter(directory, modules, rank=8)))
