# SPDX-License-Identifier: Apache-2.0
"""Matrices written by the packages that define the formats, against the values that these packages read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from quire.config.encoding import Encoding
from quire.kernels import ops
from quire.kernels.linear import RowQuantization
from quire.layers.linear import Linear
from quire.layers.quantization import FLOATS
from quire.layers.quantized.codec import codec_of
from quire.layers.quantized.method import EncodedModule, EncodedWeights
from quire.models.json_object import JsonObject
from quire.models.quantized.reader import METHODS
from tests.fixtures.published import record

FILES = sorted(record.HERE.glob("*.safetensors"))
NAME = "model.layers.0.mlp.up_proj"


def read(path: Path) -> tuple[Encoding, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    encoding = METHODS.resolve(config["quant_method"])(JsonObject(path.name, config)).encoding_of(NAME)
    assert encoding is not None
    return encoding, tensors


def loaded(encoding: Encoding, stored: dict[str, Tensor]) -> Linear:
    """A layer that was filled of a file with these tensors."""
    layer = Linear(
        in_features=record.INPUTS, out_features=record.OUTPUTS, bias=False, dtype=torch.float32, name=NAME
    )
    in_files = {name: each.to("meta") for name, each in stored.items()}
    layer.create_weights(EncodedWeights([EncodedModule(NAME, codec_of(encoding), in_files)], FLOATS))
    for name, slot in layer.slots([NAME]):
        tensor = stored[name.removeprefix(f"{NAME}.")]
        assert tuple(tensor.shape) == slot.source.stored_shape
        assert tensor.dtype in slot.dtypes
        slot.fill(tensor.reshape(slot.source.shape)[slot.source.box])
    layer.finish_loading()
    return layer


def test_each_package_has_files() -> None:
    assert {path.name.partition("-")[0] for path in FILES} == {"ct", "ao", "bnb"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_are_those_of_the_package(path: Path) -> None:
    encoding, tensors = read(path)
    stored = {
        name.removeprefix("stored."): each for name, each in tensors.items() if name.startswith("stored.")
    }
    tolerance = {"bnb-int8": 1e-3, "ct-nvfp4": 4e-3}.get(
        path.stem, 1e-6
    )  # computed in float16, and in bfloat16
    found = loaded(encoding, stored).unpacked()
    torch.testing.assert_close(found, tensors["floats"], rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("path", [path for path in FILES if "token" in path.stem], ids=lambda path: path.stem)
def test_activations_are_rounded_as_by_the_package(path: Path) -> None:
    encoding, tensors = read(path)
    said = encoding.activations
    assert said is not None
    assert not said.unlike
    how = RowQuantization(said.codes, group=said.group, symmetric=said.symmetric, bound=said.bound)
    found, want = ops.round_rows(tensors["x"], how), tensors["rounded"]
    differs = ~torch.isclose(found, want, rtol=1e-6, atol=1e-6)
    # torchao multiplies by the inverse of a scale: what lies between two codes may be the other one.
    assert differs.float().mean() <= (0.01 if path.stem.startswith("ao") else 0.0)
    assert (found - want).abs().max() < 1.01 * tensors["x"].abs().max() / 127
