# SPDX-License-Identifier: Apache-2.0
"""Every encoding but GPTQ's and AWQ's, by its definer's formula: whole, and the shares of two ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.shard import Shard
from quire.models.loader import load_model
from tests.models.harness import prepared_config
from tests.models.quantized.checkpoints import Writer, error_of_logits, same, write
from tests.models.quantized.test_gptq import pack

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
_FP4 = torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]) / 12
FP4 = torch.cat([_FP4, -_FP4])
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def group(targets: list[str] = ["Linear"], **weights: Any) -> dict[str, Any]:  # noqa: B006
    return {"targets": targets, "weights": {"dynamic": False, "symmetric": True} | weights}


def compressed(form: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{index}": each for index, each in enumerate(groups)},
        "ignore": ["lm_head"],
    } | more


def packed_integers(bits: int, size: int, *, symmetric: bool = True, reordered: bool = False) -> Writer:
    """compressed-tensors: numbers and zero points larger by half their range; zero points packed along outputs."""

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        half, count = 1 << (bits - 1), inputs // (size or inputs)
        q = torch.randint(-half, half, (outputs, inputs), generator=random)
        zeros = torch.randint(-half, half, (outputs, count), generator=random) * (not symmetric)
        scales = (0.1 / half * torch.rand(outputs, count, generator=random)).bfloat16()
        tensors = {
            "weight_packed": pack((q + half).t(), bits).t(),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(zeros + half, bits)
        groups = torch.arange(inputs) // (size or inputs)
        if reordered:
            groups = groups[torch.randperm(inputs, generator=random)]
            tensors["weight_g_idx"] = groups.int()
        return tensors, (q - zeros[:, groups]) * scales.float()[:, groups]

    return writer


def grid_scales(weight: Tensor, rows: int, columns: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scales of blocks (0: of everything), and for each number its scale."""
    outputs, inputs = weight.shape
    rows, columns = rows or outputs, columns or inputs
    scales = 0.002 * torch.rand(-(-outputs // rows), -(-inputs // columns), generator=random) + 0.0001
    spread = scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    return scales, spread


def int8(rows: int, columns: int = 0, *, zeros: bool = False) -> Writer:
    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scales, spread = grid_scales(weight, rows, columns, random)
        q = torch.randint(-128, 128, weight.shape, generator=random).to(torch.int8)
        zero = torch.randint(-20, 20, scales.shape, generator=random).to(torch.int8)
        tensors = {
            "weight": q,
            "weight_scale": scales if rows else scales.flatten(),
            "input_scale": torch.ones(1),
        }
        if not zeros:
            return tensors, q * spread
        wide = zero.repeat_interleave(len(q) // len(zero), 0).repeat_interleave(
            q.shape[1] // zero.shape[1], 1
        )
        return tensors | {"weight_zero_point": zero}, (q.float() - wide) * spread

    return writer


def fp8(rows: int, columns: int = 0, *, name: str = "weight_scale", scalar: bool = False) -> Writer:
    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scales, spread = grid_scales(weight, rows, columns, random)
        q = (40 * torch.randn(weight.shape, generator=random)).to(torch.float8_e4m3fn)
        return {"weight": q, name: scales[0, 0] if scalar else scales}, q.float() * spread

    return writer


def nvfp4(packed: str, of_all: str, *, divides: bool) -> Writer:
    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.randint(0, 16, weight.shape, generator=random)
        shape = (weight.shape[0], weight.shape[1] // 16)
        scales = (448 * torch.rand(shape, generator=random)).to(torch.float8_e4m3fn)
        factor = torch.tensor([9000.0]) if divides else torch.tensor(1 / 9000.0)
        spread = scales.float().repeat_interleave(16, 1)
        tensors = {packed: codes[:, ::2] + 16 * codes[:, 1::2], "weight_scale": scales, of_all: factor}
        tensors[packed] = tensors[packed].to(torch.uint8)
        return tensors, E2M1[codes] * (spread / factor if divides else spread * factor)

    return writer


def mxfp4(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, weight.shape, generator=random)
    exponents = torch.randint(116, 122, (len(weight), weight.shape[1] // 32), generator=random)
    tensors = {"weight_packed": codes[:, ::2] + 16 * codes[:, 1::2], "weight_scale": exponents}
    powers = 2.0 ** (exponents.float() - 127)
    return {key: each.to(torch.uint8) for key, each in tensors.items()}, E2M1[
        codes
    ] * powers.repeat_interleave(32, 1)


def bnb_int8(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    q = torch.randint(-127, 128, weight.shape, generator=random).to(torch.int8)
    largest = 0.3 * torch.rand(len(weight), generator=random)
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q * (largest[:, None] / 127)


def bnb_4bit(kind: str, *, nested: bool, storage: torch.dtype = torch.uint8) -> Writer:
    """All numbers of the matrix in a row, in blocks of 64; their scales in blocks of 256."""

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.randint(0, 16, (weight.numel(),), generator=random)
        table = (NF4 if kind == "nf4" else FP4).clone()
        state: dict[str, Any] = {
            "quant_type": kind,
            "blocksize": 64,
            "shape": list(weight.shape),
            "dtype": "bfloat16",
        }
        tensors = {
            "weight": (16 * codes[::2] + codes[1::2]).to(torch.uint8).view(storage)[:, None],
            "weight.quant_map": table,
        }
        count = weight.numel() // 64
        scales = 0.2 * torch.rand(count, generator=random)
        tensors["weight.absmax"] = scales
        if nested:
            state |= {"nested_blocksize": 256, "nested_offset": 0.05, "nested_dtype": "float32"}
            indices = torch.randint(0, 256, (count,), generator=random)
            outer, inner = 0.2 * torch.rand(-(-count // 256), generator=random), torch.linspace(0, 1, 256)
            scales = inner[indices] * outer.repeat_interleave(256)[:count] + 0.05
            tensors |= {"weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": outer}
            tensors["weight.nested_quant_map"] = inner
        said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = said
        return tensors, (table[codes] * scales.repeat_interleave(64)).view(weight.shape)

    return writer


def hqq(bits: int, axis: int) -> Writer:
    """All numbers of the matrix in a row, in groups; a word's highest bits are those of the first part."""

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        per_word, count = (10, weight.numel() // 64) if bits == 3 else (8 // bits, weight.numel() // 64)
        q = torch.randint(0, 1 << bits, (count, 64) if axis else (64, count), generator=random)
        padded = torch.cat([q, q.new_zeros(-len(q) % per_word, q.shape[1])])
        words = sum(part << bits * (per_word - 1 - i) for i, part in enumerate(padded.chunk(per_word)))
        assert isinstance(words, Tensor)
        shape = (count, 1) if axis else (1, count)
        scale = 0.2 / (1 << bits) * torch.rand(shape, generator=random)
        zero = (1 << bits) * torch.rand(shape, generator=random)
        tensors = {
            "W_q": words.to(torch.int32 if bits == 3 else torch.uint8),
            "scale": scale,
            "zero": zero,
            "shape": torch.tensor(weight.shape),
            "nbits": torch.tensor(bits),
        }
        return tensors, ((q - zero) * scale).reshape(weight.shape)

    return writer


def torchao(groups: int, *, floats: bool = False) -> Writer:
    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scales, spread = grid_scales(weight, 1, groups, random)
        q = (30 * torch.randn(weight.shape, generator=random)).to(
            torch.float8_e4m3fn if floats else torch.int8
        )
        tensors = {"_weight_qdata": q, "_weight_scale": scales}
        if not floats:
            tensors["_weight_zero_point"] = torch.ones_like(scales, dtype=torch.int8)
        return tensors, (q.float() - int(not floats)) * spread

    return writer


def ao_int4(size: int, *, tiles: bool = False) -> Writer:
    """(q - 8) * scale + zero, in rows, two to a byte, or in the words that tensor cores read."""

    def writer(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        q = torch.randint(0, 16, weight.shape, generator=random)
        shape = (len(weight), weight.shape[1] // size)
        scales = (0.02 * torch.rand(shape, generator=random)).bfloat16()
        zeros = (0.02 * torch.randn(shape, generator=random)).bfloat16()
        spread = [each.float().repeat_interleave(size, 1) for each in (scales, zeros)]
        stands_for = (q - 8) * spread[0] + spread[1]
        if not tiles:
            signed = q - 8
            pairs = (signed[:, ::2] & 15) | (signed[:, 1::2] << 4)
            tensors = {"qdata": pairs.to(torch.int8), "scale": scales.t(), "zero_point": zeros.t()}
        else:
            width = -(-q.shape[1] // 1024) * 1024
            both = torch.zeros(width // size, len(q), 2, dtype=torch.bfloat16)
            both[: shape[1]] = torch.stack((scales.t(), zeros.t()), -1)
            tensors = {"qdata": in_tiles(F.pad(q, (0, width - q.shape[1]))), "scale_and_zero": both}
        return {f"_weight_{name}": each for name, each in tensors.items()}, stands_for

    return writer


def in_tiles(q: Tensor) -> Tensor:
    """[N, K] -> int32 [N / 8, K / 128, 32, 4], by torch's matrix_to_m16n8k16_Bint4_layout."""
    tiles, blocks, lanes, words = torch.meshgrid(
        torch.arange(len(q) // 8),
        torch.arange(q.shape[1] // 128),
        torch.arange(32),
        torch.arange(4),
        indexing="ij",
    )
    packed = torch.zeros_like(tiles)
    for nibble, behind in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
        inputs = (blocks * 8 + 2 * words) * 16 + lanes % 4 * 2 + behind
        packed |= q[tiles * 8 + lanes // 4, inputs] << 4 * nibble
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def ao_config(name: str, **data: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}},
    }


def hqq_config(bits: int, axis: int) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": 64, "axis": axis, "view_as_float": False}
    return {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights},
        "skip_modules": ["lm_head"],
    }


@dataclass(frozen=True)
class Case:
    config: Mapping[str, Any]
    writer: Writer
    cut: bool = True
    """Whether two ranks can share it."""


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]}
CASES = {
    "ct-w4a16-g128": Case(
        compressed("pack-quantized", group(num_bits=4, strategy="group", group_size=128)),
        packed_integers(4, 128),
        cut=False,
    ),
    "ct-w4a16-asym": Case(
        compressed("pack-quantized", group(num_bits=4, strategy="group", group_size=64, symmetric=False)),
        packed_integers(4, 64, symmetric=False),
    ),
    "ct-w4a16-reordered": Case(
        compressed("pack-quantized", group(num_bits=4, strategy="group", group_size=64, actorder="group")),
        packed_integers(4, 64, reordered=True),
    ),
    "ct-w4a16-asym-reordered": Case(
        compressed(
            "pack-quantized",
            group(num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group"),
        ),
        packed_integers(4, 32, symmetric=False, reordered=True),
    ),
    "ct-w3a16": Case(
        compressed("pack-quantized", group(num_bits=3, strategy="group", group_size=64, symmetric=False)),
        packed_integers(3, 64, symmetric=False),
    ),
    "ct-w8a16-channel": Case(
        compressed("pack-quantized", group(num_bits=8, strategy="channel")), packed_integers(8, 0)
    ),
    "ct-int8-channel": Case(compressed("int-quantized", group(num_bits=8, strategy="channel")), int8(1)),
    "ct-int8-tensor": Case(compressed("int-quantized", group(num_bits=8, strategy="tensor")), int8(0)),
    "ct-int8-group-asym": Case(
        compressed("int-quantized", group(num_bits=8, strategy="group", group_size=64, symmetric=False)),
        int8(1, 64, zeros=True),
    ),
    "ct-fp8-tensor": Case(
        compressed("float-quantized", group(num_bits=8, type="float", strategy="tensor")), fp8(0, scalar=True)
    ),
    "ct-fp8-channel": Case(
        compressed("float-quantized", group(num_bits=8, type="float", strategy="channel")), fp8(1)
    ),
    "ct-fp8-block": Case(
        compressed(
            "float-quantized", group(num_bits=8, type="float", strategy="block", block_structure=[64, 128])
        ),
        fp8(64, 128),
        cut=False,
    ),
    "ct-nvfp4": Case(
        compressed(
            "nvfp4-pack-quantized", group(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        ),
        nvfp4("weight_packed", "weight_global_scale", divides=True),
    ),
    "ct-mxfp4": Case(
        compressed("mxfp4-pack-quantized", group(num_bits=4, type="float", strategy="group", group_size=32)),
        mxfp4,
    ),
    "fp8-tensor": Case({"quant_method": "fp8", "activation_scheme": "static"}, fp8(0, scalar=True)),
    "fp8-blocks": Case(FP8_BLOCKS, fp8(64, 64, name="weight_scale_inv")),
    "fp8-blocks-begun": Case(
        FP8_BLOCKS | {"weight_block_size": [128, 160]}, fp8(128, 160, name="weight_scale_inv"), cut=False
    ),
    "fbgemm": Case({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8(1)),
    "modelopt-fp8": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, fp8(0, scalar=True)
    ),
    "modelopt-nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm*"]},
        nvfp4("weight", "weight_scale_2", divides=False),
    ),
    "bnb-int8": Case(BNB | {"load_in_8bit": True}, bnb_int8),
    "bnb-nf4": Case(BNB | {"load_in_4bit": True}, bnb_4bit("nf4", nested=False)),
    "bnb-nf4-nested": Case(
        BNB | {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, bnb_4bit("nf4", nested=True)
    ),
    "bnb-fp4": Case(
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, bnb_4bit("fp4", nested=False)
    ),
    "bnb-fp4-nested": Case(
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        bnb_4bit("fp4", nested=True),
    ),
    "bnb-nf4-bfloat16": Case(
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
        bnb_4bit("nf4", nested=False, storage=torch.bfloat16),
    ),
    "hqq-4": Case(hqq_config(4, 1), hqq(4, 1)),
    "hqq-4-across": Case(hqq_config(4, 0), hqq(4, 0)),
    "hqq-3-across": Case(hqq_config(3, 0), hqq(3, 0)),
    "hqq-3": Case(hqq_config(3, 1), hqq(3, 1)),
    "hqq-2": Case(hqq_config(2, 1), hqq(2, 1)),
    "hqq-1": Case(hqq_config(1, 1), hqq(1, 1)),
    "hqq-8": Case(hqq_config(8, 1), hqq(8, 1)),
    "ao-int8": Case(ao_config("Int8WeightOnlyConfig", granularity={"_type": "PerRow"}), torchao(0)),
    "ao-fp8": Case(ao_config("Float8WeightOnlyConfig", granularity=None), torchao(0, floats=True)),
    "ao-int4": Case(ao_config("Int4WeightOnlyConfig", group_size=64), ao_int4(64)),
    "ao-int4-tiles": Case(
        ao_config(
            "Int4WeightOnlyConfig",
            group_size=128,
            int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
        ),
        ao_int4(128, tiles=True),
        cut=False,
    ),
    "ao-intx": Case(
        ao_config("IntxWeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 32}}),
        torchao(32),
    ),
}


def but_head(name: str) -> bool:
    return name != "lm_head"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_are_those_of_the_floats(case: Case, llama: Path, tmp_path: Path) -> None:
    quantized, floats = write(llama, tmp_path, dict(case.config), case.writer, but_head)
    assert error_of_logits(quantized, floats) < 1e-4


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cut])
def test_two_ranks_share_it(name: str, llama: Path, tmp_path: Path) -> None:
    paths = write(llama, tmp_path, dict(CASES[name].config), CASES[name].writer, but_head)
    for rank in (0, 1):
        shares = [load_model(prepared_config(path), Shard(rank, 2)) for path in paths]
        same(*shares, tolerance=1e-6)
