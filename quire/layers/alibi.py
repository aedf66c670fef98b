"""ALiBi (Press et al., 2022, arXiv:2108.12409): attention with linear biases instead of positions."""

import torch
from torch import Tensor


def slopes(num_heads: int) -> Tensor:
    """float32 [num_heads], on the host: how much a head's scores fall with each token of distance.

    For a power of two n they are the powers of 2 ** (-8 / n). For other numbers those of the next smaller one are
    followed by every other one of twice that number.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    powers = [2.0 ** (-8.0 / whole * (i + 1)) for i in range(whole)]
    between = [2.0 ** (-4.0 / whole * (2 * i + 1)) for i in range(num_heads - whole)]
    return torch.tensor(powers + between, dtype=torch.float32, device="cpu")
