# SPDX-License-Identifier: Apache-2.0
"""Checks of whole random models against transformers on the same device: every family when tiny, and 0.5B shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.engine import release
from benchmarks.gpu.kernel_checks import relative_error
from benchmarks.gpu.runner import Check
from benchmarks.gpu.shapes import QWEN_05B, TINY_TIED
from benchmarks.gpu.target import Target
from tests.fixtures.tiny_models import TINY_MODELS, VOCAB_SIZE, oracle_of, write_tiny_model
from tests.models.harness import load_tiny, logits_of

_LONG_FACTORS = "phi3-longrope"
"""Depends on the longest allowed sequence, and transformers on that of the batch."""


def checks(target: Target, scratch: Path) -> Iterator[Check]:
    """`scratch` is a folder for checkpoints; they take 1 GB there."""
    names = ["llama", "gemma2"] if target.tiny else sorted(TINY_MODELS.keys() - {_LONG_FACTORS})
    for name in names:
        yield Check(f"{name} (tiny), float32, logits", partial(_tiny, target, name, scratch), 1e-3)
    for backend in ("torch_sdpa", "reference"):
        run = partial(_tiny, target, "llama", scratch, attention_backend=backend)
        yield Check(f"llama (tiny), attention by {backend}, logits", run, 1e-3)
    if not target.is_gpu:
        return
    yield Check("0.5B Qwen 2, float32, logits", partial(_large, target, scratch, torch.float32), 1e-3)
    # How many times the error of transformers in the same precision.
    yield Check(
        "0.5B Qwen 2, bfloat16, error beside transformers'",
        partial(_large, target, scratch, torch.bfloat16),
        2.0,
    )
    # On a CPU int8 is 0.043 off, and int4 0.665: random weights leave no logit that stands out.
    for kind, limit in (("int8", 0.06), ("fp8", 0.3), ("int4", 0.75)):
        run = partial(_quantized, target, scratch, kind)
        yield Check(f"0.5B Qwen 2, {kind}, logits beside float32", run, limit)


def _prompts(vocab: int, *lengths: int) -> list[list[int]]:
    torch.manual_seed(0)
    return [torch.randint(3, vocab, (length,)).tolist() for length in lengths]


@torch.inference_mode()
def _theirs(directory: Path, prompts: list[list[int]], dtype: torch.dtype, target: Target) -> list[Tensor]:
    """transformers' logits of every position, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    model = model.to(target.device)
    return [model(torch.tensor([prompt], device=target.device)).logits[0].float() for prompt in prompts]


def _ours(directory: Path, prompts: list[list[int]], target: Target, **args: Any) -> list[Tensor]:
    model = load_tiny(directory, device=target.device.type, **args)
    return logits_of(model, prompts, chunk_sizes=[7, 33, 300], device=target.device)


def _worst(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(relative_error(*pair) for pair in zip(ours, theirs, strict=True))


def _tiny(target: Target, name: str, scratch: Path, **args: Any) -> float:
    directory = scratch / name
    if not directory.exists():
        write_tiny_model(name, directory)
    prompts = _prompts(VOCAB_SIZE, 1, 17, 90)
    with torch.inference_mode():
        oracle = oracle_of(directory)
        theirs = [oracle(torch.tensor([prompt])).logits[0].float().to(target.device) for prompt in prompts]
    return _worst(_ours(directory, prompts, target, **args), theirs)


def _checkpoint(scratch: Path, target: Target) -> Path:
    """0.5B random weights, large enough that logits tell something."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    directory = scratch / "qwen2-0.5b"
    if not directory.exists():
        shape = QWEN_05B if target.is_gpu else TINY_TIED
        names = {"architectures", "model_type", "torch_dtype", "head_dim"}
        options = {name: value for name, value in shape.config().items() if name not in names}
        torch.manual_seed(0)
        with torch.device(target.device):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**options, initializer_range=0.04))
        model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _large(target: Target, scratch: Path, dtype: torch.dtype) -> float:
    directory, prompts = _checkpoint(scratch, target), _prompts(300, 5, 700)
    exact = _theirs(directory, prompts, torch.float32, target)
    error = _worst(_ours(directory, prompts, target, dtype=str(dtype).removeprefix("torch.")), exact)
    if dtype != torch.float32:
        error /= max(_worst(_theirs(directory, prompts, dtype, target), exact), 1e-9)
    release(target)
    return error


def _quantized(target: Target, scratch: Path, kind: str) -> float:
    """Return the error of the logits against float32: the largest 1 - cosine of a position."""
    directory, prompts = _checkpoint(scratch, target), _prompts(300, 5, 700)
    exact = _theirs(directory, prompts, torch.float32, target)
    ours = _ours(directory, prompts, target, dtype="bfloat16", quantization=kind)
    similar = [torch.cosine_similarity(a, b).min().item() for a, b in zip(ours, exact, strict=True)]
    release(target)
    return 1.0 - min(similar)
