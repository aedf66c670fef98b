"""How a checkpoint has the matrices that it does not have in floats, as data: rules by the names of its modules.

Invariant: torch-free and plain, so that it crosses processes and is part of the key of the packed-weights cache. What
the kinds of encodings are is in `quire.layers.quantized`; which config asks for which, in `quire.models.quantized`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Option = int | float | bool | str | None


@dataclass(frozen=True)
class Encoding:
    """A kind, which is a row of `quire.layers.quantized.table.CODECS`, and the fields of its codec."""

    kind: str
    options: Mapping[str, Option] = field(default_factory=dict)
    weight_only: bool = False
    """Whether the checkpoint says that activations are not rounded."""


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
    """The first that matches a module decides; where none does, it is floats."""
    unread: tuple[str, ...] = ()
    """Patterns of tensors that are knowingly left out."""
    cache_scales: bool = False
    """Whether its files may have scales for keys and values that are kept in E4M3."""
    notes: tuple[str, ...] = ()
    """What it asks for that is done in another way, a sentence each, for the log."""

    def encoding_of(self, module: str) -> Encoding | None:
        """Of a module of the checkpoint, by its full name."""
        return next((rule.encoding for rule in self.rules if rule.matches(module)), None)
