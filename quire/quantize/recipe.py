# SPDX-License-Identifier: Apache-2.0
"""Options of `quire quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.quantize.grid import Grid

METHODS = ("rtn", "gptq", "awq")


@dataclass(frozen=True)
class Recipe:
    """Quantization options; raises ConfigError where options do not go together."""

    method: str
    grid: Grid
    calibration: Path | None = None
    num_sequences: int = 128
    sequence_length: int = 512
    act_order: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.calibration is not None and not self.calibrates:
            raise ConfigError("--calibration means nothing with --method rtn, which looks at weights alone")
        if self.act_order is not None and self.method != "gptq":
            raise ConfigError(
                f"--act-order means nothing with --method {self.method}: it is the order of gptq"
            )

    @property
    def calibrates(self) -> bool:
        """True if the model runs over calibration texts."""
        return self.method != "rtn"

    @property
    def orders(self) -> bool:
        """True if gptq rounds large inputs first."""
        return self.method == "gptq" and self.act_order is not False
