# SPDX-License-Identifier: Apache-2.0
"""The accuracy of each weight format on real weights: bounds on how far it moves the probabilities of a real text.

The truth is float32 on the same weights. Weights, text and kernels are fixed, so a reading is the same in every run
on one instruction set; the bounds leave a sixth or more for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer
from tests.real.conftest import GGUF

pytestmark = pytest.mark.real

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
CHUNK = 512  # tokens, of which the second half counts
PRECISE = {"quantization_config": {"mode": "precise"}}
INT8_CACHE = {"kv_cache_dtype": "int8"}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "bf16 highest": {"dtype": "bfloat16", "matmul_precision": "highest"},
    "int8": {"quantization": "int8"},
    "int8 precise": {"quantization": "int8", **PRECISE},
    "int8 per output": {"quantization": "int8", "quantization_config": {"group_size": 0}},
    "int4": {"quantization": "int4"},
    "int4 precise": {"quantization": "int4", **PRECISE},
    "int4-plain": {"quantization": "int4-plain"},
    "bf16, int8 cache": {"dtype": "bfloat16", **INT8_CACHE},
    "int8, int8 cache": {"quantization": "int8", **INT8_CACHE},
}
"""Name -> arguments of the engine."""
BOUNDS: dict[str, dict[str, float]] = {
    "smollm2": {
        "bf16": 0.5,
        "bf16 highest": 0.3,
        "int8": 1.5,
        "int8 precise": 1.2,
        "int8 per output": 2.6,
        "int4": 2.6,
        "int4 precise": 2.0,
        "int4-plain": 16.5,
        "bf16, int8 cache": 1.5,
        "int8, int8 cache": 1.8,
    },
    "gemma3": {
        "bf16": 0.5,
        "bf16 highest": 0.4,
        "int8": 1.4,
        "int8 precise": 1.2,
        "bf16, int8 cache": 3.5,
        "int4": 12.0,
        "int4-plain": 18.0,
    },
}
"""Model -> name -> the most that the root of the mean square of the change may be, in percent."""


@pytest.mark.parametrize("model", BOUNDS)
def test_formats_keep_the_probabilities_of_a_text(
    model: str, real: Callable[[str], Path], in_floats: Callable[[str], Path]
) -> None:
    ids = Tokenizer.from_dir(real(model) / GGUF[model]).encode(TEXT, add_special_tokens=False)
    chunks = [ids[start : start + CHUNK] for start in range(0, len(ids) - CHUNK + 1, CHUNK)]
    floats = in_floats(model)
    truth = probabilities(floats, chunks, dtype="float32")
    found = {
        name: rms_percent(probabilities(floats, chunks, **FORMATS[name]), truth) for name in BOUNDS[model]
    }
    print(found)
    too_far = {name: found[name] for name, bound in BOUNDS[model].items() if found[name] > bound}
    assert not too_far, found
    orders = (
        ("int8 precise", "int8", "int8 per output", "int4-plain"),
        ("int4 precise", "int4", "int4-plain"),
    )
    for names in orders:
        measured = [found[name] for name in names if name in found]
        assert measured == sorted(measured), found


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.999), ("int4", 0.96)])
def test_rounded_embeddings_point_where_those_in_floats_do(
    quantization: str, least: float, real: Callable[[str], Path]
) -> None:
    """The weights are the floats that were trained, which lie on no grid."""
    texts = [part for part in TEXT.split("\n\n") if len(part.split()) > 8][:40]
    floats, rounded = (
        embeddings(real("minilm"), texts, **options)
        for options in ({"dtype": "float32"}, {"quantization": quantization})
    )
    cosines = (floats * rounded).sum(-1)
    print(float(cosines.min()), float(cosines.mean()))
    assert float(cosines.min()) >= least


def probabilities(model: Path, chunks: list[list[int]], **options: Any) -> torch.Tensor:
    """Return the probability of each token of the chunks' second halves, in float64."""
    llm = LLM(str(model), device="cpu", max_model_len=CHUNK + 8, enable_prefix_caching=False, **options)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    llm.shutdown()
    logprobs = []
    for chunk, output in zip(chunks, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for place in range(CHUNK // 2, CHUNK):
            entry = output.prompt_logprobs[place]
            assert entry is not None
            logprobs.append(entry[chunk[place]].logprob)
    return torch.tensor(logprobs, dtype=torch.float64).exp()


def rms_percent(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the root of the mean square of the change, in percent."""
    return 100 * float((ours - truth).square().mean().sqrt())


def embeddings(model: Path, texts: list[str], **options: Any) -> torch.Tensor:
    """Return unit vectors [texts, width]."""
    llm = LLM(str(model), device="cpu", **options)
    vectors = torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
    llm.shutdown()
    return torch.nn.functional.normalize(vectors, dim=-1)
