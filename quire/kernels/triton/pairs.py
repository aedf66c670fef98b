"""Integer codes as floats of 16 bits, two in each instruction, where NVIDIA's instructions can be written.

What the compiler makes of the same arithmetic is twice as many instructions, and they take longer than reading the
weights.

Invariant: every number is exact, so it has the bits of the plain way.
"""

from __future__ import annotations

import triton
import triton.language as tl

BFLOAT16_BASE, FLOAT16_BASE = tl.constexpr(128), tl.constexpr(1024)
"""Numbers from which on a float's last bit is 1."""

_SPLIT = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def _of_nibbles(dtype: str, base: str, one: str, shift: int) -> str:
    """The four bits at `shift` become the last ones of a float at the base, to which minus the base is added."""
    return f"""{{
        .reg .b32 code, base, one;
        mov.b32 base, {base};
        mov.b32 one, {one};
        shr.u32 code, $1, {shift};
        lop3.b32 code, code, 0x000f000f, base, 0xea;
        fma.rn.{dtype}x2 $0, code, one, $2;
    }}"""


_BFLOAT16_NIBBLES = tl.constexpr(
    tuple(_of_nibbles("bf16", "0x43004300", "0x3f803f80", shift) for shift in range(0, 16, 4))
)
_FLOAT16_NIBBLES = tl.constexpr(
    tuple(_of_nibbles("f16", "0x64006400", "0x3c003c00", shift) for shift in range(0, 16, 4))
)


@triton.jit
def split_words(words):
    """The low and the high halves of words, int32: two tensors of int16."""
    return tl.inline_asm_elementwise(
        _SPLIT, "=r,=r,r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
    )


@triton.jit
def nibbles_less(halves, quarter: tl.constexpr, zero, dtype: tl.constexpr):
    """The four bits at 4 * quarter of numbers of 16 bits, less an int32 that broadcasts: bfloat16 or float16."""
    if dtype == tl.bfloat16:
        less = (-(zero + BFLOAT16_BASE)).to(tl.bfloat16)
        return tl.inline_asm_elementwise(
            _BFLOAT16_NIBBLES[quarter], "=r,r,r", [halves, less], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        less = (-(zero + FLOAT16_BASE)).to(tl.float16)
        return tl.inline_asm_elementwise(
            _FLOAT16_NIBBLES[quarter], "=r,r,r", [halves, less], dtype=tl.float16, is_pure=True, pack=2
        )
