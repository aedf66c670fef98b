# SPDX-License-Identifier: Apache-2.0
"""Quantized encodings of checkpoint weights, as rules on module names, and ggml tensor types of GGUF files.

Invariant: torch-free plain data that crosses processes and is part of the packed-weights cache key. The kinds of
encodings are in `quire.layers.quantized`; their selection by config in `quire.models.quantized`. A row of a GGUF
tensor consists of whole blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TensorType:
    """ggml block type: `size` numbers of a row in `num_bytes` bytes."""

    name: str
    size: int
    num_bytes: int

    @property
    def is_quantized(self) -> bool:
        """True if numbers share block data."""
        return self.size > 1


_SUPER_BLOCK = 256

READ: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 2 + 16),
    3: TensorType("Q4_1", 32, 4 + 16),
    6: TensorType("Q5_0", 32, 2 + 4 + 16),
    7: TensorType("Q5_1", 32, 4 + 4 + 16),
    8: TensorType("Q8_0", 32, 2 + 32),
    10: TensorType("Q2_K", _SUPER_BLOCK, 16 + 64 + 4),
    11: TensorType("Q3_K", _SUPER_BLOCK, 32 + 64 + 12 + 2),
    12: TensorType("Q4_K", _SUPER_BLOCK, 4 + 12 + 128),
    13: TensorType("Q5_K", _SUPER_BLOCK, 4 + 12 + 32 + 128),
    14: TensorType("Q6_K", _SUPER_BLOCK, 128 + 64 + 16 + 2),
    20: TensorType("IQ4_NL", 32, 2 + 16),
    23: TensorType("IQ4_XS", _SUPER_BLOCK, 2 + 2 + 4 + 128),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 1 + 16),
}  # ggml type number -> supported type.

TYPES: dict[str, TensorType] = {kind.name: kind for kind in READ.values()}  # By name.

OTHERS: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}  # ggml type number -> name of an unsupported type.


Option = int | float | bool | str | None


@dataclass(frozen=True)
class Activations:
    """Quantization of linear layers' inputs as a checkpoint specifies it; formulas are in `quire.kernels.linear`."""

    codes: Literal["int8", "e4m3"] = "int8"
    group: int = 0  # Inputs of a token that share a scale; 0: all.
    static: bool = False  # The files have one scale per module for all of its inputs.
    symmetric: bool = True
    bound: float | None = None  # Bound of magnitudes for computing scales.
    unlike: str = ""  # Description of an unsupported specification.


@dataclass(frozen=True)
class Encoding:
    """Encoding kind, a row of `quire.layers.quantized.codec.CODECS`, with the fields of its codec."""

    kind: str
    options: Mapping[str, Option] = field(default_factory=dict)
    activations: Activations | None = None  # None: activations are not quantized.

    @property
    def weight_only(self) -> bool:
        """True if only weights are quantized."""
        return self.activations is None


@dataclass(frozen=True)
class EncodingRule:
    """Encoding of the modules whose full name matches a regular expression; None: floats."""

    pattern: str
    encoding: Encoding | None

    def matches(self, module: str) -> bool:
        return re.fullmatch(self.pattern, module, re.DOTALL) is not None


@dataclass(frozen=True)
class CheckpointQuantization:
    """Quantization of a checkpoint's linear layers."""

    method: str  # The checkpoint's name for it.
    # The first match decides, unless a module's tensors do; without a match it is floats.
    rules: tuple[EncodingRule, ...]
    unread: tuple[str, ...] = ()  # Patterns of tensors that are ignored on purpose.
    cache_scales: Literal["int8", "e4m3"] | None = None  # Cache dtype for which the files may have scales.
    notes: tuple[str, ...] = ()  # Deviations from the specification, a sentence each, for the log.

    def encoding_of(self, module: str) -> Encoding | None:
        """Return the encoding of a checkpoint module, by its full name."""
        return next((rule.encoding for rule in self.rules if rule.matches(module)), None)

    def encoding_if_quantized(self, module: str) -> Encoding | None:
        """Return the encoding of a module whose tensors show that it is quantized, even if a rule leaves it alone."""
        found = (rule.encoding for rule in self.rules if rule.encoding is not None and rule.matches(module))
        return next(found, None)
