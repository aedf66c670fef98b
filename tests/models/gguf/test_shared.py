# SPDX-License-Identifier: Apache-2.0
"""Models in GGUF on several ranks, and as target and draft models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire import LLM, SamplingParams
from quire.kernels.cpu import library
from tests.fixtures.gguf_models import write_gguf
from tests.models.harness import load_tiny
from tests.models.test_tensor_parallel import logits, together

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 128}
SPARSE = {"intermediate_size": 128, "moe_intermediate_size": 64}
"""Each rank has whole blocks."""
MIXED = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K}


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [
        ("llama", Kind.Q8_0, {"intermediate_size": 128}),
        ("llama", Kind.Q4_K, WIDE),
        ("qwen3moe", Kind.Q8_0, SPARSE | {"head_dim": 32}),
        ("deepseekv3", Kind.Q8_0, SPARSE),
    ],
    ids=["Q8_0", "Q4_K_M", "experts", "latents"],
)
def test_ranks_match_one_rank(name: str, kind: Kind, sizes: dict[str, int], tmp_path: Path) -> None:
    mixed = MIXED if kind is Kind.Q4_K else {}
    path, _ = write_gguf(name, tmp_path, kind, mixed=mixed, **sizes)
    options = {"max_model_len": 64, "quantization_config": {"mode": "precise"}}
    alone = logits(load_tiny(path, **options))
    first, second = together(path, 2, logits, **options)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("target", "draft"), [(Kind.Q8_0, Kind.Q4_0), (Kind.F16, Kind.Q8_0)])
def test_drafts_of_a_model_change_no_token(
    target: Kind, draft: Kind, tmp_path: Path, restore_threads: None
) -> None:
    paths = []
    for name, kind in (("target", target), ("draft", draft)):
        (tmp_path / name).mkdir()
        paths.append(write_gguf("llama", tmp_path / name, kind)[0])
    options = {"skip_tokenizer_init": True, "max_model_len": 96, "cpu_threads": 1}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 9, 31]}, {"prompt_token_ids": [7, 12, 80, 3, 44]}]
    given = {"method": "draft_model", "model": str(paths[1]), "num_speculative_tokens": 3, "adaptive": False}
    plain, guessed = (
        LLM(str(paths[0]), **options, speculative_config=config).generate(prompts, params, use_tqdm=False)
        for config in ({}, given)
    )
    for one, other in zip(plain, guessed, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert sum(output.metrics.num_accepted_tokens for output in guessed) > 0
