# SPDX-License-Identifier: Apache-2.0
"""Codecs by the kinds of `Encoding`."""

from __future__ import annotations

from typing import Any

from quire.config.encoding import Encoding
from quire.layers.quantized.codec import Codec
from quire.plugins import PluginTable, subclass_of

_HERE = "quire.layers.quantized"

CODECS: PluginTable[type[Codec]] = PluginTable(
    "quire.codecs",
    "an encoding of a checkpoint's weights",
    {
        "floats": f"{_HERE}.codec:Floats",
        "gptq": f"{_HERE}.gptq:Gptq",
        "ggml": f"{_HERE}.ggml:Ggml",
        "awq": f"{_HERE}.gptq:Awq",
        "int8": f"{_HERE}.integers:Int8Codec",
        "packed_integers": f"{_HERE}.integers:PackedIntegers",
        "fp8": f"{_HERE}.floats:Fp8Codec",
        "mxfp4_blocks": f"{_HERE}.floats:Mxfp4Blocks",
        "mxfp4": f"{_HERE}.floats:Mxfp4",
        "nvfp4": f"{_HERE}.floats:Nvfp4",
        "bnb_int8": f"{_HERE}.bitsandbytes:BnbInt8",
        "bnb_4bit": f"{_HERE}.bitsandbytes:Bnb4",
        "hqq": f"{_HERE}.hqq:Hqq",
        "torchao": f"{_HERE}.torchao:TorchAo",
        "torchao_int4": f"{_HERE}.torchao:TorchAoInt4",
        "torchao_int4_tiles": f"{_HERE}.torchao:TorchAoInt4Tiles",
    },
    subclass_of(Codec),
)


def codec_of(encoding: Encoding) -> Codec:
    """Return the codec of an encoding.

    Raises:
        ConfigError: there is none of its kind.
    """
    kind: Any = CODECS.resolve(encoding.kind)
    codec: Codec = kind(**encoding.options)
    return codec
