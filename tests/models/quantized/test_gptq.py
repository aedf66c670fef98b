# SPDX-License-Identifier: Apache-2.0
"""GPTQ by the packing that AutoGPTQ and GPTQModel define, written here bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import Shard
from quire.models.hf_config import read_hf_config
from quire.models.loader import load_model
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, prepared_config
from tests.models.quantized.checkpoints import error_of_logits, same, write


def pack(numbers: Tensor, bits: int) -> Tensor:
    """[R, C] in [0, 2^bits) -> int32 [R * bits / 32, C]: a column is one stream of bits, the lowest first."""
    planes = torch.stack([(numbers >> bit) & 1 for bit in range(bits)], 1).flatten(0, 1)
    words = torch.unflatten(planes, 0, (-1, 32)).long() << torch.arange(32)[None, :, None]
    return words.sum(1).to(torch.int32)  # wraps


class Writer:
    """Random numbers, scales and zero points in the given form."""

    def __init__(
        self,
        bits: int,
        group: int,
        *,
        symmetric: bool = False,
        reordered: bool = False,
        shuffled: bool = True,
        version: int = 1,
    ) -> None:
        """`reordered` but not `shuffled`: in an order that could be any, and is not."""
        self.bits, self.group, self.symmetric = bits, group, symmetric
        self.reordered, self.shuffled, self.version = reordered, shuffled, version

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "sym": self.symmetric,
            "desc_act": self.reordered,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
        } | more

    def __call__(self, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = inputs if self.group == -1 else self.group
        count = -(-inputs // size)
        top = 1 << self.bits
        q = torch.randint(0, top, (inputs, outputs), generator=random)
        zeros = torch.randint(0, top, (count, outputs), generator=random)
        if self.symmetric:
            zeros.fill_(top // 2)
        scales = (torch.rand(count, outputs, generator=random) * 0.2 / top + 0.01 / top).half()
        g_idx = torch.arange(inputs) // size
        if (
            self.reordered and self.shuffled
        ):  # by what inputs are, so modules that read the same have the same order
            g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        stored = (zeros - 1) % top if self.version == 1 else zeros
        tensors = {
            "qweight": pack(q, self.bits),
            "qzeros": pack(stored.t().contiguous(), self.bits).t(),
            "scales": scales,
            "g_idx": g_idx.int(),
        }
        return tensors, (scales.float()[g_idx] * (q - zeros[g_idx]).float()).t()


WRITERS = [
    pytest.param(
        Writer(bits, group, reordered=order, version=version), id=f"{bits}-{group}-{order}-{version}"
    )
    for bits, group, order, version in [
        (4, 128, False, 1),
        (4, 32, True, 1),
        (4, -1, False, 2),
        (8, 64, True, 2),
        (3, 128, False, 1),
        (2, 64, True, 1),
        (8, -1, False, 1),
        (8, 64, False, 1),
    ]
] + [
    pytest.param(
        Writer(4, 128, symmetric=True, reordered=reordered, version=version), id=f"sym-{reordered}-{version}"
    )
    for reordered, version in [(False, 1), (False, 2), (True, 1)]
]


@pytest.mark.parametrize("writer", WRITERS)
def test_logits_are_those_of_the_floats(writer: Writer, llama: Path, tmp_path: Path) -> None:
    quantized, floats = write(llama, tmp_path, writer.config(), writer, lambda name: "lm_head" not in name)
    same(load_tiny(quantized), load_tiny(floats))
    assert error_of_logits(quantized, floats) < 1e-4


def but_head(name: str) -> bool:
    return name != "lm_head"


@pytest.mark.parametrize("said", [{"desc_act": False}, {"desc_act": None}], ids=str)
def test_groups_are_those_of_the_file(said: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """Though the config says that inputs are in them as they come, or nothing."""
    writer = Writer(4, 32, reordered=True)
    paths = write(llama, tmp_path, writer.config(**said), writer, but_head)
    same(*map(load_tiny, paths))


def test_groups_of_inputs_in_order_are_sharded_for_any_config(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 32, reordered=True, shuffled=False)
    path, _ = write(llama, tmp_path, writer.config(), writer, but_head)
    kinds = {
        layer.matrix().scheme.kind
        for _, layer in load_model(prepared_config(path), Shard(0, 2)).checkpoint_layers()
        if isinstance(layer, MatrixLayer) and layer.name.endswith("down_proj")
    }
    assert kinds == {"int4"}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "format": "gptq_v2"},
        {"method": "gptq", "format": "gptq_v2"},
        {"method": "gptq", "checkpoint_format": "gptq_v2"},
        {"quant_method": "gptq", "method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    ],
    ids=str,
)
def test_gptqmodel_key_names_are_read(config: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    """Zero points of the two versions differ by one."""
    writer = Writer(4, 64, version=2)
    plain = {"bits": 4, "group_size": 64, "sym": False, "desc_act": False}
    same(*map(load_tiny, write(llama, tmp_path, plain | config, writer, but_head)))


def test_two_names_of_the_version_must_agree(llama: Path) -> None:
    config = Writer(4, 64).config(format="gptq_v2")
    with pytest.raises(
        ModelLoadError, match="checkpoint_format must be what format is, 'gptq_v2', got \"gptq\""
    ):
        read_hf_config(llama, {"quantization_config": config})


@pytest.mark.parametrize("apart", [False, True])
def test_reordered_numbers_stay_packed_where_modules_agree(apart: bool, llama: Path, tmp_path: Path) -> None:
    """`apart`: k_proj's order is another than that of q_proj and v_proj, with which it is one matrix here."""
    writer = Writer(4, 32, reordered=True)
    quantized, _ = write(llama, tmp_path, writer.config(), writer, lambda name: "lm_head" not in name)
    if apart:
        tensors = load_file(quantized / SINGLE_NAME)
        name = "model.layers.0.self_attn.k_proj.g_idx"
        save_file(tensors | {name: tensors[name].flip(0)}, quantized / SINGLE_NAME)
    kept = {
        layer.name.removeprefix("model.layers.0."): (
            layer.matrix().scheme.kind,
            layer.input_order is not None,
        )
        for _, layer in load_tiny(quantized).checkpoint_layers()
        if isinstance(layer, MatrixLayer) and "layers.0" in layer.name
    }
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    expected = dict.fromkeys(names, ("int4", True))
    assert kept == expected | ({names[0]: ("float", False)} if apart else {})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("reordered", "shuffled"), [(False, False), (True, True), (True, False)])
def test_two_ranks_share_it(reordered: bool, shuffled: bool, rank: int, llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 32, reordered=reordered, shuffled=shuffled)
    paths = write(llama, tmp_path, writer.config(), writer, lambda name: "lm_head" not in name)
    same(*(load_model(prepared_config(path), Shard(rank, 2)) for path in paths))


def test_modules_may_differ_and_be_floats(llama: Path, tmp_path: Path) -> None:
    """By patterns of the config, and where the file has a float weight."""
    four, eight = Writer(4, 64), Writer(8, 32)

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        return (eight if weight.shape[1] == 384 else four)(weight, random)

    dynamic = {r"-:.*layers\.1\.self_attn\.q_proj": {}, r".*\.down_proj": {"bits": 8, "group_size": 32}}
    left = ("layers.1.self_attn.q_proj", "lm_head", "layers.0.mlp.up_proj")
    paths = write(llama, tmp_path, four.config(dynamic=dynamic), writer, lambda name: not name.endswith(left))
    same(*map(load_tiny, paths))


def test_a_head_may_be_quantized(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 128)
    paths = write(llama, tmp_path, writer.config(lm_head=True), writer, lambda name: True)
    same(*map(load_tiny, paths))


def test_tensor_shape_unlike_the_config_is_refused(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 128)
    path, _ = write(llama, tmp_path, writer.config(group_size=64), writer, lambda name: "lm_head" not in name)
    shapes = r"down_proj.qzeros' has shape \[3, 32\], config.json implies \[6, 32\]"
    with pytest.raises(ModelLoadError, match=shapes):
        load_tiny(path)


@pytest.mark.parametrize("options", [{"bits": 5}, {"checkpoint_format": "marlin"}], ids=str)
def test_unknown_gptq_option_is_refused(options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 128)
    path, _ = write(llama, tmp_path, writer.config(**options), writer, lambda name: "lm_head" not in name)
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(options))} = .* is not supported"):
        load_tiny(path)


def test_a_model_that_transformers_runs_reads_it_too(llama: Path, tmp_path: Path) -> None:
    writer = Writer(4, 64)
    quantized, floats = write(llama, tmp_path, writer.config(), writer, lambda name: "lm_head" not in name)
    assert error_of_logits(quantized, floats, model_impl="transformers") < 1e-4
