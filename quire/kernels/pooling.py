"""What tokens of a text can be made one vector of, and in which type."""

from typing import Literal

import torch

Accumulated = Literal["sum", "weighted", "max"]
"""The sum, that in which the n-th token counts n times, and the greatest of each number."""

SUM_DTYPE: dict[Accumulated, torch.dtype] = {
    "sum": torch.float64,
    "weighted": torch.float64,
    "max": torch.float32,
}
