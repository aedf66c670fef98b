"""The types that GGUF files give to tensors: ggml's, by their numbers.

Invariant: torch-free data. A row of a tensor is whole blocks of a type, one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """`size` numbers of a row, in so many bytes, are a block."""

    name: str
    size: int
    num_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether numbers share something with those beside them."""
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
}
"""Those that quire reads."""

TYPES: dict[str, TensorType] = {kind.name: kind for kind in READ.values()}
"""Those by their names."""

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
}
"""Those that it can only name."""
