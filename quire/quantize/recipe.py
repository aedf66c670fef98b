# SPDX-License-Identifier: Apache-2.0
"""Options of `quire quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.quantize.grid import IntegerGrid

METHODS = ("rtn", "gptq", "awq", "awq-gptq")


@dataclass(frozen=True)
class Recipe:
    """Quantization options; raises ConfigError where options do not go together."""

    method: str
    grid: IntegerGrid
    calibration: Path | None = None
    num_sequences: int = 128
    sequence_length: int = 512
    act_order: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.calibration is not None and not self.calibrates:
            raise ConfigError(
                "--calibration has no effect with --method rtn, which reads weights only: leave one of them out"
            )
        if self.act_order is not None and not self.compensates:
            raise ConfigError(
                f"--act-order has no effect with --method {self.method}: it is for gptq and awq-gptq"
            )

    @property
    def calibrates(self) -> bool:
        """True if the model runs over calibration texts."""
        return self.method != "rtn"

    @property
    def folds(self) -> bool:
        """True if scales of inputs are folded into their producers before weights are rounded."""
        return self.method in ("awq", "awq-gptq")

    @property
    def compensates(self) -> bool:
        """True if later inputs compensate the error of rounding earlier ones."""
        return self.method in ("gptq", "awq-gptq")

    @property
    def orders(self) -> bool:
        """True if large inputs are rounded first."""
        return self.compensates and self.act_order is not False
