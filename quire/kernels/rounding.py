"""How checkpoints have activations rounded, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RowRounding:
    """To codes and back, with a scale for each `group` inputs of a row (0: all); see `ops.round_rows`."""

    codes: Literal["int8", "e4m3"]
    group: int = 0
    lowest: int = -128
    """The least integer."""
    symmetric: bool = True
    """Whether a scale that is found has no zero point."""
    bound: float | None = None
    """Of the magnitudes by which a scale is found."""
    scale: float | None = None
    """That of everything; None: it is found."""
    zero: float = 0.0
    """The zero point that belongs to `scale`."""

    @property
    def makes_bytes(self) -> bool:
        """Whether all of a row becomes integers of 8 bits with one scale and one zero point."""
        return self.codes == "int8" and not self.group

    @property
    def shifts(self) -> bool:
        """Whether there may be a zero point that is not 0."""
        return not self.symmetric if self.scale is None else self.zero != 0.0
