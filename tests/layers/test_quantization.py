# SPDX-License-Identifier: Apache-2.0
"""A method of one's own: what it takes to read a checkpoint that is quantized already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.kernels import reference
from quire.kernels.linear import WeightScheme
from quire.layers.base import parameter
from quire.layers.linear import Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.quantization import FLOATS, METHODS, QuantMethod, method_of
from quire.layers.shard import Shard
from quire.layers.slot import Slot, TensorPart, length
from quire.models import loader
from quire.models.base import CausalLM
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import prepared_config


class Nibbles(QuantMethod):
    """Checkpoints with `qweight` uint8 [N, K / 2], two values less 8 in each byte, and `scales` [N]."""

    name = "nibbles"

    def create(self, layer: MatrixLayer) -> None:
        columns = length(layer.columns) // 2
        layer.qweight = parameter(layer.num_rows, columns, dtype=torch.uint8)
        layer.scales = parameter(layer.num_rows, dtype=torch.float32)

    def slots(self, layer: MatrixLayer, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        qweight, scales = cast(Tensor, layer.qweight), cast(Tensor, layer.scales)
        every, own = slice(0, layer.inputs // 2), slice(layer.columns.start // 2, layer.columns.stop // 2)
        for piece in layer.pieces(names):
            part = TensorPart((piece.num_rows, every.stop), (piece.region, every), (piece.rows, own))
            yield f"{piece.name}.qweight", Slot(qweight[piece.place], "zeros", part, (torch.uint8,))
            part = TensorPart((piece.num_rows,), (piece.region,), (piece.rows,))
            yield f"{piece.name}.scales", Slot(scales[piece.place], "ones", part)

    def replaced(self, layer: MatrixLayer, device_type: str) -> Collection[str]:
        return ("qweight", "scales")

    def finish(self, layer: MatrixLayer) -> None:
        weight = plain(cast(Tensor, layer.qweight), cast(Tensor, layer.scales))
        del layer.qweight, layer.scales
        layer.adopt(weight.to(layer.dtype))
        FLOATS.finish(layer)


def plain(qweight: Tensor, scales: Tensor) -> Tensor:
    values = torch.stack([qweight & 15, qweight >> 4], -1).flatten(-2)
    return (values.float() - 8) * scales.unsqueeze(-1)


@pytest.fixture
def checkpoints(tmp_path: Path, tiny_model: Callable[[str], Path]) -> tuple[Path, Path]:
    """A model with nibbles in its MLP's linear layers, and one with the floats that they stand for."""
    source = tiny_model("llama")
    random = torch.Generator().manual_seed(0)
    nibbles, floats = load_file(source / SINGLE_NAME), load_file(source / SINGLE_NAME)
    for name in [name for name in nibbles if ".mlp." in name]:
        outputs, inputs = nibbles.pop(name).shape
        path = name.removesuffix("weight")
        nibbles[f"{path}qweight"] = torch.randint(
            0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=random
        )
        nibbles[f"{path}scales"] = 0.01 + 0.01 * torch.rand(outputs, generator=random)
        floats[name] = plain(nibbles[f"{path}qweight"], nibbles[f"{path}scales"])
    for kind, tensors in (("nibbles", nibbles), ("floats", floats)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_bytes((source / "config.json").read_bytes())
        save_file(tensors, tmp_path / kind / SINGLE_NAME)
    return tmp_path / "nibbles", tmp_path / "floats"


@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)], ids=("whole", "first", "second"))
def test_a_method_of_ones_own_reads_a_quantized_checkpoint(
    shard: Shard, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or a rank's share, its weights are those of the floats, bit by bit; no layer and no model has changed."""

    def by_name(model: CausalLM, config: object) -> list[QuantMethod]:
        layers = (layer for _, layer in model.checkpoint_layers())
        return [Nibbles() if ".mlp." in layer.name else FLOATS for layer in layers]

    nibbles, floats = checkpoints
    expected = loader.load_model(prepared_config(floats), shard)
    monkeypatch.setattr(loader, "quant_methods", by_name)
    model = loader.load_model(prepared_config(nibbles), shard)
    for (_, ours), (_, theirs) in zip(model.checkpoint_layers(), expected.checkpoint_layers(), strict=True):
        got, want = ours.tensors(), theirs.tensors()
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_new_kind_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "nibbles", Nibbles)
    layer = Linear(in_features=8, out_features=4, bias=False, dtype=torch.float32)
    layer.create_weights(method_of(WeightScheme("nibbles")))
    assert [name for name, _ in layer.slots(["fc"])] == ["fc.qweight", "fc.scales"]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_scale_for_all_inputs_serves_some_of_them(kind: str) -> None:
    packed = reference.pack_weight(torch.randn(20, 256), WeightScheme(kind))
    some = slice(64, 192)
    assert torch.equal(
        reference.unpack_weight(packed.narrowed(some)), reference.unpack_weight(packed)[:, some]
    )
