# SPDX-License-Identifier: Apache-2.0
"""Models in GGUF against transformers' float32 run of what their bytes stand for."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from quire.models.gguf.architectures import ARCHITECTURES
from tests.fixtures.gguf_families import CASES as MORE
from tests.fixtures.gguf_models import CASES, write_gguf
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of
from tests.models.harness import load_tiny, logits_of

TOLERANCE = 1e-4
ENCODERS = {"bert"}  # see test_encoders
LENGTHS = (1, 7, 30)


def assert_equal_logits(path: Path, oracle: Path) -> None:
    draw = random.Random(1)
    sequences = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    theirs = oracle_of(oracle)
    with torch.inference_mode():
        expected = [theirs(torch.tensor([sequence])).logits[0] for sequence in sequences]
    assert max(logits.abs().max().item() for logits in expected) > 0.5, "logits too small to tell anything"
    model = load_tiny(path, max_model_len=32, quantization_config={"mode": "precise"})
    for ours, other in zip(logits_of(model, sequences, chunk_sizes=[5]), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=0.0, atol=TOLERANCE)


LEFT_TO_MORE = MORE.keys() - {
    "olmo3",
    "glm4",
    "cohere2",
    "erniemoe",
    "deepseekv3",
    "qwen3next",
    "jamba",
    "nemotronh",
    "gemma3n",
    "apertus",
    "qwen35",
}
"""Each of the others has something that no other has: in layout, norms, rotation, states or metadata."""


@pytest.mark.parametrize("name", quick(CASES, CASES.keys() - LEFT_TO_MORE))
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_equal_logits(*write_gguf(name, tmp_path))


def test_every_architecture_has_a_case() -> None:
    assert {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()} == ARCHITECTURES.keys() - ENCODERS


KEPT = {
    Kind.Q4_0: ("int4", 32, True),
    Kind.Q8_0: ("int8", 32, True),
    Kind.Q4_K: ("int4", 32, False),
    Kind.Q6_K: ("int6", 16, True),
    Kind.IQ4_XS: ("iq4_nl", 32, True),
}
SMALL_BLOCKS = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.IQ4_NL,
    Kind.MXFP4,
)
LARGE_BLOCKS = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)


@pytest.mark.parametrize("kind", SMALL_BLOCKS, ids=lambda kind: kind.name)
def test_types_with_small_blocks(kind: Kind, tmp_path: Path) -> None:
    assert_equal_logits(*write_gguf("llama", tmp_path, kind))


@pytest.mark.parametrize("kind", LARGE_BLOCKS, ids=lambda kind: kind.name)
def test_types_with_blocks_of_256(kind: Kind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}
    assert_equal_logits(*write_gguf("llama", tmp_path, kind, **sizes))


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_matrices_are_kept_in_the_numbers_of_the_file(kind: Kind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    path, _ = write_gguf("llama", tmp_path, kind, **sizes)
    model = load_tiny(path)
    schemes = [
        layer.packed.scheme for _, layer in model.checkpoint_layers() if getattr(layer, "packed", None)
    ]
    assert len(schemes) == 5
    assert {(scheme.kind, scheme.group_size, scheme.symmetric) for scheme in schemes} == {KEPT[kind]}


MIXES = {
    "Q4_K_M": (
        Kind.Q4_K,
        {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K},
        [("int6", 16, False), ("int4", 32, False)],
    ),
    "Q4_K_S": (Kind.Q4_K, {"v_proj": Kind.Q5_K}, [("int6", 32, False), ("int4", 32, False)]),
    "Q3_K_M": (
        Kind.Q3_K,
        {"v_proj": Kind.Q6_K, "up_proj": Kind.Q4_0},
        [("int6", 16, True), ("int6", 16, True)],
    ),
    "IQ4_XS": (
        Kind.IQ4_XS,
        {"v_proj": Kind.Q5_1, "k_proj": Kind.Q8_0},
        [("int8", 32, False), ("iq4_nl", 32, True)],
    ),
}
"""Types of most matrices and of some, and what q, k and v, and gate and up, are kept in."""


@pytest.mark.parametrize("name", MIXES)
def test_merged_weights_of_several_types_keep_their_values(name: str, tmp_path: Path) -> None:
    kind, mixed, kept = MIXES[name]
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    path, oracle = write_gguf("llama", tmp_path, kind, mixed=mixed, **sizes)
    assert_equal_logits(path, oracle)
    layers = dict(load_tiny(path).named_modules())
    schemes = [
        layers[f"model.layers.0.{part}"].packed.scheme for part in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    ]
    assert [(scheme.kind, scheme.group_size, scheme.symmetric) for scheme in schemes] == kept
