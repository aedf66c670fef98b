# SPDX-License-Identifier: Apache-2.0
"""Tables of tokens that are quantized: they are looked up as the floats that their numbers stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError
from quire.layers.embedding import VocabEmbedding
from quire.layers.shard import Shard
from quire.models.loader import load_model
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, prepared_config
from tests.models.quantized.checkpoints import Writer, error_of_logits, same, write
from tests.models.quantized.test_gptq import Writer as Gptq
from tests.models.quantized.test_published_encodings import (
    BNB,
    ao_config,
    bnb_4bit,
    but_head,
    compressed,
    fp8,
    group,
    packed_integers,
    torchao,
)

TABLE = "model.embed_tokens"
FOUR_BITS = group(num_bits=4, strategy="group", group_size=64)
CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "compressed-tensors": (
        compressed("pack-quantized", FOUR_BITS, FOUR_BITS | {"targets": ["Embedding"]}),
        packed_integers(4, 64),
    ),
    "torchao": (
        ao_config("IntxWeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 32}}),
        torchao(32),
    ),
    "fp8": ({"quant_method": "fp8"}, fp8(0, scalar=True)),
    "bitsandbytes": (BNB | {"load_in_4bit": True}, bnb_4bit("nf4", nested=False)),
    "gptq": (Gptq(4, 64, reordered=True).config(), Gptq(4, 64, reordered=True)),
}


def with_table(llama: Path, tmp_path: Path, config: dict[str, Any], writer: Writer) -> tuple[Path, Path]:
    quantized, floats = write(llama, tmp_path, config, writer, but_head)
    encoded, plain = load_file(quantized / SINGLE_NAME), load_file(floats / SINGLE_NAME)
    made, stands_for = writer(encoded.pop(f"{TABLE}.weight"), torch.Generator().manual_seed(7))
    encoded |= {f"{TABLE}.{name}": each.contiguous() for name, each in made.items()}
    save_file(encoded, quantized / SINGLE_NAME)
    save_file(plain | {f"{TABLE}.weight": stands_for.float().contiguous()}, floats / SINGLE_NAME)
    return quantized, floats


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rows_are_those_of_the_floats(
    case: tuple[dict[str, Any], Writer], llama: Path, tmp_path: Path
) -> None:
    paths = with_table(llama, tmp_path, *case)
    models = [load_tiny(path) for path in paths]
    same(*models, tolerance=1e-6)
    tables = [layer for _, layer in models[0].checkpoint_layers() if isinstance(layer, VocabEmbedding)]
    assert [layer.packed is None for layer in tables if layer.only_looked_up] == [True]
    assert error_of_logits(*paths) < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_share_it(rank: int, llama: Path, tmp_path: Path) -> None:
    paths = with_table(llama, tmp_path, *CASES["compressed-tensors"])
    same(*(load_model(prepared_config(path), Shard(rank, 2)) for path in paths), tolerance=1e-6)


def test_modes_are_of_products(llama: Path, tmp_path: Path) -> None:
    """There is no scale of activations for a table."""
    rounded = FOUR_BITS | {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}
    config = compressed("pack-quantized", rounded, rounded | {"targets": ["Embedding"]})
    paths = with_table(llama, tmp_path, config, packed_integers(4, 64))
    same(load_tiny(paths[0], quantization_config={"mode": "checkpoint"}), load_tiny(paths[1]), tolerance=1e-6)


def test_a_part_that_is_missing_is_named(llama: Path, tmp_path: Path) -> None:
    path, _ = with_table(llama, tmp_path, *CASES["compressed-tensors"])
    tensors = load_file(path / SINGLE_NAME)
    del tensors[f"{TABLE}.weight_scale"]
    save_file(tensors, path / SINGLE_NAME)
    with pytest.raises(ModelLoadError, match=f"{TABLE}.weight_scale"):
        load_tiny(path)
