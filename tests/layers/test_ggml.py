# SPDX-License-Identifier: Apache-2.0
"""Blocks of every type, against the `gguf` package: the same numbers."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from quire.config.encoding import OTHERS, READ
from quire.layers.quantized.ggml import dequantized
from tests.fixtures.folded import folded

QUANTIZED = {code: kind for code, kind in READ.items() if kind.is_quantized}


@folded("code", QUANTIZED, ids=lambda code: READ[code].name)
def test_all_bytes_decode_as_in_ggml(code: int) -> None:
    kind = QUANTIZED[code]
    blocks = np.random.default_rng(code).integers(0, 256, (64, 3 * kind.num_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[blocks == 255] = 254  # as an exponent it is none, by the standard, and 2^128 to ggml
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(code))
    found = dequantized(kind, torch.from_numpy(blocks))
    assert found.shape == (64, 3 * kind.size)
    # Random scales are NaN now and then, and there is no word on the bits of a NaN.
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.9
    assert (np.isnan(found.numpy()) == ~numbers).all()
    assert (found.numpy() == expected)[numbers].all()


@folded("code", READ, ids=lambda code: READ[code].name)
def test_types_have_the_sizes_of_the_package(code: int) -> None:
    kind = READ[code]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)] == (kind.size, kind.num_bytes)
    assert gguf.GGMLQuantizationType(code).name == kind.name


def test_every_type_has_a_name() -> None:
    assert {code: READ[code].name if code in READ else OTHERS[code] for code in READ | OTHERS} == {
        int(kind): kind.name for kind in gguf.GGMLQuantizationType
    }
