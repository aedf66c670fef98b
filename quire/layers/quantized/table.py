"""The codecs by the kinds of `Encoding`."""

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
        "floats": f"{_HERE}.floats:Floats",
        "gptq": f"{_HERE}.gptq:Gptq",
        "mxfp4": f"{_HERE}.mxfp4:Mxfp4",
    },
    subclass_of(Codec),
)


def codec_of(encoding: Encoding) -> Codec:
    """The codec of an encoding.

    Raises:
        ConfigError: there is none of its kind.
    """
    kind: Any = CODECS.resolve(encoding.kind)
    codec: Codec = kind(**encoding.options)
    return codec
