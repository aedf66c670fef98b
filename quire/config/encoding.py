"""How a checkpoint has the matrices that it does not have in floats, as data: rules by the names of its modules.

Invariant: torch-free and plain, so that it crosses processes and is part of the key of the packed-weights cache. What
the kinds of encodings are is in `quire.layers.quantized`; which config asks for which, in `quire.models.quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Option = int | float | bool | str | None


@dataclass(frozen=True)
class Activations:
    """How a checkpoint has what its matrices are multiplied by rounded; `quire.kernels.rounding` has the formulas."""

    codes: Literal["int8", "e4m3"] = "int8"
    group: int = 0
    """Inputs of a token that share a scale; 0: all."""
    static: bool = False
    """Whether the files have a number for each module, which is the scale of all of its inputs."""
    symmetric: bool = True
    bound: float | None = None
    """Of magnitudes, when scales are found."""
    unlike: str = ""
    """What it asks for that none of this says, in words."""


@dataclass(frozen=True)
class Encoding:
    """A kind, which is a row of `quire.layers.quantized.table.CODECS`, and the fields of its codec."""

    kind: str
    options: Mapping[str, Option] = field(default_factory=dict)
    activations: Activations | None = None
    """None: the checkpoint says that they are not rounded."""

    @property
    def weight_only(self) -> bool:
        """Whether weights alone are rounded."""
        return self.activations is None


@dataclass(frozen=True)
class EncodingRule:
    """The encoding of the modules whose whole name matches a regular expression; None: they are floats."""

    pattern: str
    encoding: Encoding | None

    def matches(self, module: str) -> bool:
        return re.fullmatch(self.pattern, module, re.DOTALL) is not None


@dataclass(frozen=True)
class CheckpointQuantization:
    """All that a checkpoint says of its linear layers."""

    method: str
    """As the checkpoint calls it."""
    rules: tuple[EncodingRule, ...]
    """The first that matches a module decides, where its tensors leave that open; where none does, it is floats."""
    unread: tuple[str, ...] = ()
    """Patterns of tensors that are knowingly left out."""
    cache_scales: Literal["int8", "e4m3"] | None = None
    """Codes in which keys and values are to be kept, if its files may have scales for them."""
    notes: tuple[str, ...] = ()
    """What it asks for that is done in another way, a sentence each, for the log."""

    def encoding_of(self, module: str) -> Encoding | None:
        """Of a module of the checkpoint, by its full name."""
        return next((rule.encoding for rule in self.rules if rule.matches(module)), None)

    def encoding_if_quantized(self, module: str) -> Encoding | None:
        """Return the encoding of a module whose tensors show that it is quantized, even if a rule leaves it alone."""
        found = (rule.encoding for rule in self.rules if rule.encoding is not None and rule.matches(module))
        return next(found, None)
