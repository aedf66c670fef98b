# SPDX-License-Identifier: Apache-2.0
"""Tiny models on GPU kernels, in Triton's interpreter: correct, and batch-invariant with the option."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fixtures.quick import quick
from tests.kernels import triton_interpreter

pytest.importorskip("triton", reason="no Triton for this platform")
from quire.kernels.linear import QuantizedRows
from quire.kernels.triton import attention, linear, quantize
from quire.layers.attention import attention_backends
from quire.layers.experts import ExpertRouter
from quire.layers.linear import Linear
from quire.models.base import CausalLM
from tests.models.harness import load_tiny, logits_of

PROMPTS = [[5, 6, 7], list(range(40, 75)), [200]]
SHORT = [[5, 6, 7], list(range(40, 58)), [200]]
"""Beyond the windows of 8 tokens and several blocks of 4."""


@pytest.fixture(autouse=True)
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.use_gpu_kernels(monkeypatch)
    monkeypatch.setattr(attention, "INVARIANT_PART_TOKENS", 32)  # so that there are several


def logits(model: CausalLM, *chunk_sizes: int, prompts: list[list[int]] = PROMPTS) -> list[Tensor]:
    return logits_of(model, prompts, chunk_sizes=chunk_sizes)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen2", None),
        ("opt", None),
        ("qwen3", None),
        ("gemma3", None),
        ("qwen2", "int8"),
        ("gemma2", "int4"),
        ("bloom", None),
        ("cohere-qk-norm", None),
        ("olmo2", None),
        ("mixtral", None),
        ("deepseekv3", None),
        ("deepseekv2", "int8"),
        ("gptoss", None),
        ("bamba", None),
        ("qwen3next", "int4"),
        ("recurrentgemma", None),
        ("jamba", None),
    ],
)
def test_logits_are_those_of_the_oracle(
    name: str, quantization: str | None, tiny_model: Callable[[str], Path]
) -> None:
    """Between them: tied table, also in int4, biases, windows, soft caps, learned positions, layer norms, norms of
    heads of four kinds, linear biases, neighbors rotated, experts, latents, states of four kinds, integer weights."""
    options = {"quantization": quantization, "quantization_config": {"head": "int4"} if quantization else {}}
    model = load_tiny(tiny_model(name), **options)
    assert attention_backends(model) == ["triton"]
    linears = [
        layer
        for layer in model.modules()
        if isinstance(layer, Linear) and not isinstance(layer, ExpertRouter)
    ]
    assert {layer.packed is not None for layer in linears} == {quantization is not None}
    got = logits(model, 9, prompts=SHORT)
    with pytest.MonkeyPatch.context() as patch:
        triton_interpreter.use_reference(patch)
        want = logits(load_tiny(tiny_model(name), **options), 64, prompts=SHORT)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=2e-4)


@pytest.mark.more
@pytest.mark.parametrize(("name", "quantization"), [("qwen3", None), ("gemma2", "int4"), ("qwen2", "fp8")])
def test_batch_invariant_logits_have_the_same_bits_in_any_batch(
    name: str, quantization: str | None, tiny_model: Callable[[str], Path]
) -> None:
    two_layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    fewer = two_layers if name == "gemma2" else {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = load_tiny(
        tiny_model(name),
        batch_invariant=True,
        quantization=quantization,
        load_format="dummy",
        hf_overrides=fewer,
    )
    assert all(layer.packed is not None for layer in model.modules() if isinstance(layer, Linear))
    together = logits(model, 64)
    for ours, expected in zip(logits(model, 31, 1), together, strict=True):
        assert torch.equal(ours, expected)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits(model, 20, prompts=[prompt])[0], expected)


@pytest.mark.more
def test_fp8_logits_are_near(tiny_model: Callable[[str], Path]) -> None:
    models = [load_tiny(tiny_model("qwen2"), quantization=kind) for kind in ("fp8", None)]
    for ours, theirs in zip(*(logits(model, 64, prompts=SHORT) for model in models), strict=True):
        assert torch.nn.functional.cosine_similarity(ours, theirs).mean() > 0.9


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the activations that were quantized in a pass of their own."""
    shapes: list[tuple[int, ...]] = []

    def quantize_rows(x: Tensor) -> QuantizedRows:
        shapes.append(tuple(x.shape))
        return quantize.quantize_rows(x)

    monkeypatch.setattr(linear, "quantize_rows", quantize_rows)
    return shapes


@pytest.mark.parametrize("name", quick(["qwen2", "gemma2"], ["qwen2"]))
def test_fp8_logits_have_the_bits_of_separate_quantization(
    name: str,
    tiny_model: Callable[[str], Path],
    passes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}

    def load() -> CausalLM:
        return load_tiny(tiny_model(name), quantization="fp8", load_format="dummy", hf_overrides=one_layer)

    fused = load()
    got = logits(fused, 64, prompts=SHORT)
    assert passes == [(22, fused.config.arch.num_heads * fused.config.arch.head_dim)], "before o_proj"
    passes.clear()
    monkeypatch.setattr(Linear, "reads", lambda self, source: None)
    assert all(map(torch.equal, logits(load(), 64, prompts=SHORT), got))
    assert len(passes) == 4


@pytest.mark.more
def test_only_inputs_of_fp8_weights_are_quantized(
    tiny_model: Callable[[str], Path], passes: list[tuple[int, ...]]
) -> None:
    ignored = {
        "ignore": ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.2"]
    }
    model = load_tiny(tiny_model("qwen2"), quantization="fp8", quantization_config=ignored)
    logits(model, 64, prompts=SHORT)
    assert len(passes) == 2, "before o_proj of the first two layers"
