# SPDX-License-Identifier: Apache-2.0
"""AWQ by the packing that AutoAWQ defines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.layers.shard import Shard
from quire.models.loader import load_model
from tests.models.harness import prepared_config
from tests.models.quantized.checkpoints import Writer, error_of_logits, same, write

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def pack(numbers: Tensor) -> Tensor:
    """[R, N] in [0, 16) -> int32 [R, N / 8]: nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    columns = torch.unflatten(numbers.long(), 1, (-1, 8))
    return sum(columns[..., of] << 4 * nibble for nibble, of in enumerate((0, 2, 4, 6, 1, 3, 5, 7))).to(
        torch.int32
    )


def in_groups(size: int) -> Writer:
    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        q = torch.randint(0, 16, (inputs, outputs), generator=random)
        zeros = torch.randint(0, 16, (inputs // size, outputs), generator=random)
        scales = (0.01 * torch.rand(inputs // size, outputs, generator=random) + 0.001).half()
        tensors = {"qweight": pack(q), "qzeros": pack(zeros), "scales": scales}
        groups = torch.arange(inputs) // size
        return tensors, ((q - zeros[groups]) * scales.float()[groups]).t()

    return writer


writer = in_groups(64)


def test_logits_are_those_of_the_floats(llama: Path, tmp_path: Path) -> None:
    quantized, floats = write(llama, tmp_path, CONFIG, writer, lambda name: "lm_head" not in name)
    assert error_of_logits(quantized, floats) < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_share_it(rank: int, llama: Path, tmp_path: Path) -> None:
    config = CONFIG | {"modules_to_not_convert": ["v_proj"]}
    paths = write(llama, tmp_path, config, writer, lambda name: not name.endswith(("lm_head", "v_proj")))
    same(*(load_model(prepared_config(path), Shard(rank, 2)) for path in paths))
