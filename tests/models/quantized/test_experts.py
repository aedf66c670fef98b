# SPDX-License-Identifier: Apache-2.0
"""Experts that are quantized: a layer's in one tensor, or one by one though the family has them in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.layers.experts import Expert
from quire.layers.shard import Shard
from quire.models.loader import load_model
from quire.models.weight_files import SINGLE_NAME
from tests.models.harness import load_tiny, prepared_config
from tests.models.quantized.checkpoints import Writer, same, write
from tests.models.quantized.test_awq import CONFIG as AWQ
from tests.models.quantized.test_awq import in_groups as awq
from tests.models.quantized.test_gptq import Writer as Gptq
from tests.models.quantized.test_published_encodings import (
    compressed,
    fp8,
    group,
    int8,
    nvfp4,
    packed_integers,
)

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
GPTQ = Gptq(4, 16)
"""Intermediate sizes of the tiny models are multiples of 16 alone."""


def load(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / SINGLE_NAME)


def transposed(writer: Writer) -> Writer:
    """As transformers' FbgemmFp8Llama4TextExperts has them: [K, N], scales for each output."""

    def turned(weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        tensors, floats = writer(weight, random)
        scale = tensors["weight_scale"]
        wide = weight.shape[0] > weight.shape[1]  # gate and up, whose scales lie the other way
        return {"weight": tensors["weight"].t(), "weight_scale": scale.t() if wide else scale}, floats

    return turned


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    for kind in ("quantized", "floats"):
        (tmp_path / kind).mkdir()
    return tmp_path / "quantized", tmp_path / "floats"


def save(
    source: Path, config: dict[str, Any], pairs: list[tuple[Path, dict[str, Tensor]]]
) -> tuple[Path, ...]:
    """The quantized tensors, with what the config says of them, and the floats."""
    says = json.loads((source / "config.json").read_text())
    for (directory, tensors), more in zip(pairs, ({"quantization_config": config}, {}), strict=True):
        (directory / "config.json").write_text(json.dumps(says | more))
        save_file({name: each.contiguous() for name, each in tensors.items()}, directory / SINGLE_NAME)
    return tuple(directory for directory, _ in pairs)


def in_stacks(
    source: Path, directories: tuple[Path, Path], config: dict[str, Any], writer: Writer
) -> tuple[Path, ...]:
    """Each stack [E, K, N] of the source as transformers keeps FP8 experts, its scales beside it."""
    random = torch.Generator().manual_seed(0)
    quantized, floats = load(source), load(source)
    for name in [name for name in floats if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        members = [writer(expert.t(), random) for expert in quantized.pop(name)]
        for key in members[0][0]:
            tensor = torch.stack([tensors[key] for tensors, _ in members])
            quantized[name + {"weight": ""}.get(key, f"_{key.removeprefix('weight_')}")] = tensor
        floats[name] = torch.stack([stands_for.t() for _, stands_for in members])
    return save(source, config, list(zip(directories, (quantized, floats), strict=True)))


@pytest.mark.parametrize(
    ("config", "writer", "cut"),
    [
        (FP8, fp8(16, 16, name="weight_scale_inv"), False),
        ({"quant_method": "fp8"}, fp8(0, scalar=True), True),
        ({"quant_method": "fbgemm_fp8"}, transposed(fp8(1)), True),
    ],
    ids=["blocks", "tensor", "fbgemm"],
)
def test_stacks(
    config: dict[str, Any],
    writer: Writer,
    cut: bool,
    tiny_model: Callable[[str], Path],
    directories: tuple[Path, Path],
) -> None:
    """Attention and shared experts stay floats, which the files say and the config does not."""
    paths = in_stacks(tiny_model("llama4"), directories, config, writer)
    same(*map(load_tiny, paths), tolerance=1e-6)
    if cut:
        same(*(load_model(prepared_config(path), Shard(1, 2)) for path in paths), tolerance=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "writer", "kind"),
    [
        ("FP8", fp8(0, scalar=True), "fp8"),
        ("NVFP4", nvfp4("weight", "weight_scale_2", divides=False), "e2m1"),
    ],
)
def test_stacks_of_model_optimizer(
    algorithm: str,
    writer: Writer,
    kind: str,
    tiny_model: Callable[[str], Path],
    directories: tuple[Path, Path],
) -> None:
    """A layer's experts in one parameter, [K, N] each, with one scale for all of them, and names in full beside it."""
    random = torch.Generator().manual_seed(0)
    quantized, floats = load(tiny_model("llama4")), load(tiny_model("llama4"))
    for name in [name for name in floats if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack = quantized.pop(name)
        tensors, stands_for = writer(stack.transpose(1, 2).flatten(0, 1), random)
        for key, tensor in tensors.items():
            matrices = tensor.unflatten(0, (len(stack), -1)).transpose(1, 2) if tensor.dim() == 2 else tensor
            quantized[name + {"weight": ""}.get(key, f"_{key}")] = matrices.clone()
        quantized[f"{name}_input_scale"] = torch.tensor(0.5)
        floats[name] = stands_for.unflatten(0, (len(stack), -1)).transpose(1, 2)
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    paths = save(tiny_model("llama4"), config, list(zip(directories, (quantized, floats), strict=True)))
    model = load_tiny(paths[0])
    same(model, load_tiny(paths[1]), tolerance=1e-6)
    kinds = {each.gate_up_proj.matrix().scheme.kind for each in model.modules() if isinstance(each, Expert)}
    assert kinds == {kind}
    if algorithm == "FP8":  # half of what an expert reads is no multiple of 16
        same(*(load_model(prepared_config(path), Shard(1, 2)) for path in paths), tolerance=1e-6)


def test_experts_in_floats_may_be_one_by_one_or_in_stacks(
    tiny_model: Callable[[str], Path], directories: tuple[Path, Path]
) -> None:
    """Qwen 3.5's are published in stacks [E, N, K]; tools that look for linear layers leave them one by one."""
    apart = load(tiny_model("qwen3.5moe"))
    assert any(".experts.1.gate_proj.weight" in name for name in apart)
    stacked = {
        name: tensor.transpose(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else tensor
        for name, tensor in put_together(apart, interleaved=False).items()
    }
    paths = save(tiny_model("qwen3.5moe"), {}, list(zip(directories, (apart, stacked), strict=True)))
    (paths[0] / "config.json").write_bytes((paths[1] / "config.json").read_bytes())
    one, other = (load_tiny(path).state_dict() for path in paths)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


IN_GROUPS = {"strategy": "group", "group_size": 16}
NVFP4 = compressed(
    "nvfp4-pack-quantized", group(num_bits=4, type="float", strategy="tensor_group", group_size=16)
)
FORMS: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "gptq": (GPTQ.config(), GPTQ, "int4"),
    "fp8": (FP8, fp8(16, 16, name="weight_scale_inv"), "fp8"),
    "awq": (AWQ | {"group_size": 16}, awq(16), "int4"),
    "w4a16": (
        compressed("pack-quantized", group(num_bits=4, **IN_GROUPS)),
        packed_integers(4, 16),
        "int4",
    ),
    "w4a16-asym": (
        compressed("pack-quantized", group(num_bits=4, symmetric=False, **IN_GROUPS)),
        packed_integers(4, 16, symmetric=False),
        "int4",
    ),
    "w8a16": (
        compressed("pack-quantized", group(num_bits=8, **IN_GROUPS)),
        packed_integers(8, 16),
        "int8",
    ),
    "w8a8": (
        compressed("int-quantized", group(num_bits=8, strategy="channel")),
        int8(1),
        "int8",
    ),
    "nvfp4": (NVFP4, nvfp4("weight_packed", "weight_global_scale", divides=True), "e2m1"),
    "modelopt-nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        nvfp4("weight", "weight_scale_2", divides=False),
        "e2m1",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_stacks_of_modules(
    name: str, tiny_model: Callable[[str], Path], directories: tuple[Path, Path]
) -> None:
    """A layer whose experts are one module [E, N, K] stores each tensor as a stack of the experts' tensors."""
    config, writer, kind = FORMS[name]
    random = torch.Generator().manual_seed(0)
    quantized, floats = load(tiny_model("granitemoe")), load(tiny_model("granitemoe"))
    for stack in [name for name, each in floats.items() if each.dim() == 3]:
        members = [writer(expert, random) for expert in quantized.pop(stack)]
        for key in members[0][0]:
            tensor = torch.stack([tensors[key] for tensors, _ in members])
            quantized[f"{stack.removesuffix('.weight')}.{key}"] = tensor
        floats[stack] = torch.stack([stands_for for _, stands_for in members])
    paths = save(tiny_model("granitemoe"), config, list(zip(directories, (quantized, floats), strict=True)))
    model = load_tiny(paths[0])
    same(model, load_tiny(paths[1]), tolerance=1e-6)
    kinds = {each.gate_up_proj.matrix().scheme.kind for each in model.modules() if isinstance(each, Expert)}
    assert kinds == {kind}


@pytest.mark.parametrize("family", ["llama4", "gptoss"])
@pytest.mark.parametrize("name", FORMS)
def test_one_by_one(
    name: str,
    family: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """As tools write them that look for linear layers, and take stacks apart to have some."""
    config, writer, kind = FORMS[name]
    source = tmp_path / "apart"
    source.mkdir()
    save_file(taken_apart(load(tiny_model(family)), interleaved=family == "gptoss"), source / SINGLE_NAME)
    (source / "config.json").write_bytes((tiny_model(family) / "config.json").read_bytes())
    quantized, floats = write(source, tmp_path, config, writer, lambda name: ".experts." in name)
    model = load_tiny(quantized)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    (stacked / "config.json").write_bytes((floats / "config.json").read_bytes())
    save_file(put_together(load(floats), interleaved=family == "gptoss"), stacked / SINGLE_NAME)
    same(model, load_tiny(stacked), tolerance=1e-6)
    kinds = {each.gate_up_proj.matrix().scheme.kind for each in model.modules() if isinstance(each, Expert)}
    assert kinds == {kind}


def taken_apart(tensors: dict[str, Tensor], *, interleaved: bool) -> dict[str, Tensor]:
    """Stacks [E, K, N], and of biases [E, N], as modules of one expert each."""
    apart = {}
    for name, stack in tensors.items():
        path, _, leaf = name.rpartition(".")
        if not path.endswith(".experts"):
            apart[name] = stack
            continue
        kind = "bias" if leaf.endswith("_bias") else "weight"
        leaf = leaf.removesuffix("_bias")
        for index, member in enumerate(stack):
            matrix = member.t() if member.dim() == 2 else member
            halves = {leaf: matrix}
            if leaf == "gate_up_proj":
                gate, up = (matrix[::2], matrix[1::2]) if interleaved else matrix.chunk(2)
                halves = {"gate_proj": gate, "up_proj": up}
            apart |= {f"{path}.{index}.{part}.{kind}": each.contiguous() for part, each in halves.items()}
    return apart


def put_together(tensors: dict[str, Tensor], *, interleaved: bool) -> dict[str, Tensor]:
    """The inverse."""
    whole, members = {}, {}
    for name, tensor in tensors.items():
        path, mark, rest = name.partition(".experts.")
        if not mark:
            whole[name] = tensor
            continue
        index, part, kind = rest.split(".")
        members.setdefault((path, kind), {}).setdefault(int(index), {})[part] = tensor
    for (path, kind), experts in members.items():
        gate_up = []
        for index in sorted(experts):
            gate, up = experts[index]["gate_proj"], experts[index]["up_proj"]
            gate_up.append(torch.stack((gate, up), 1).flatten(0, 1) if interleaved else torch.cat((gate, up)))
        down = [experts[index]["down_proj"] for index in sorted(experts)]
        for leaf, matrices in (("gate_up_proj", gate_up), ("down_proj", down)):
            stack = torch.stack([each.t() if each.dim() == 2 else each for each in matrices]).contiguous()
            whole[f"{path}.experts.{leaf}" + ("_bias" if kind == "bias" else "")] = stack
    return whole
