# SPDX-License-Identifier: Apache-2.0
"""gpt-oss as it is published, with experts in MXFP4: its weights are those that transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError
from quire.layers.quantized.codec import Coded
from quire.layers.quantized.floats import Mxfp4Blocks
from quire.layers.shard import Shard
from quire.models import loader
from quire.models.staged_copy import StagedCopy
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import prepared_config
from tests.models.quantized.checkpoints import same
from tests.models.test_expert_parallel import logits, of_replicas
from tests.models.test_staged_copy import LateStream

PACKED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """By transformers: [E, N, G, 16] and [E, N, G] -> [E, 32 G, N]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return values


def random_blocks(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
    return blocks, torch.randint(118, 126, shape, dtype=torch.uint8, generator=random)


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]
) -> tuple[Path, Path]:
    """The model with experts in MXFP4, and with the floats that they stand for."""
    source, directory = tiny_model("gptoss"), tmp_path_factory.mktemp("mxfp4")
    config = json.loads((source / "config.json").read_text())
    packed, floats = load_file(source / SINGLE_NAME), load_file(source / SINGLE_NAME)
    for seed, name in enumerate(
        name for name in floats if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ):
        count, inputs, outputs = packed.pop(name).shape
        blocks, scales = random_blocks(seed, count, outputs, inputs // 32)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = unpacked(blocks, scales).contiguous()
    for kind, tensors, more in (("packed", packed, PACKED), ("floats", floats, {})):
        (directory / kind).mkdir()
        (directory / kind / "config.json").write_text(json.dumps(config | more))
        save_file(tensors, directory / kind / SINGLE_NAME)
    return directory / "packed", directory / "floats"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_those_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = random_blocks(0, 1, 8, 3)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    expected = unpacked(blocks, scales)[0].t()
    coded = Mxfp4Blocks().decoded({"blocks": blocks[0], "scales": scales[0]})
    assert isinstance(coded, Coded)
    assert torch.equal(coded.widened().to(dtype).float(), expected)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_weights_are_those_of_the_floats(options: dict[str, Any], checkpoints: tuple[Path, Path]) -> None:
    """Bit by bit, whatever they are kept as."""
    same(*(loader.load_model(prepared_config(directory, **options)) for directory in checkpoints))


@pytest.mark.parametrize("rank", [0, 1])
def test_so_are_the_shares_of_two_ranks(rank: int, checkpoints: tuple[Path, Path]) -> None:
    same(*(loader.load_model(prepared_config(directory), Shard(rank, 2)) for directory in checkpoints))


def test_experts_are_distributed_whole(checkpoints: tuple[Path, Path]) -> None:
    for directory in checkpoints:
        found, _ = of_replicas(directory, 1, enable_expert_parallel=True)
        assert torch.equal(found, logits(loader.load_model(prepared_config(directory))))


def test_staged_weights_equal_the_floats(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "tensor_reader", lambda device: StagedCopy(LateStream(), 4000))
    same(*(loader.load_model(prepared_config(directory)) for directory in checkpoints))


def test_packed_weights_are_kept_in_a_file_like_any_others(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    config = prepared_config(checkpoints[0], packed_weights_cache=str(tmp_path))
    same(*(loader.load_model(config) for _ in range(2)))


def test_experts_in_a_method_unlike_the_config_are_refused(checkpoints: tuple[Path, Path]) -> None:
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(ModelLoadError, match=r"experts\.\w+_(blocks|scales)' has no place"):
        loader.load_model(prepared_config(checkpoints[0], hf_overrides=gptq))
