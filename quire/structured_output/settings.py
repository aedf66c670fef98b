"""How constraints are read, checked and kept: the keys of `--structured-outputs-config`."""

from __future__ import annotations

from typing import Annotated

import msgspec

MiB = 2**20


class StructuredOutputsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `--structured-outputs-config`, named as vLLM's where it has them.

    Args:
        backend: "auto", or the name of a backend.
        disable_any_whitespace: JSON is written without spaces and line breaks, unless a request has a pattern for them.
        disable_additional_properties: objects have no properties that a schema does not name, unless it says so.
        compile_timeout_s: seconds of CPU time that one constraint may take to compile.
        compile_memory_mb: MiB that this may take.
        cache_mb: MiB of compiled grammars that are kept.
        num_checkers: processes that check constraints at the same time.
        mask_time_ms: mean CPU time that each step of a constrained text may take; see `MaskBudget`.
        jump_ahead: tokens that are guessed at a time where a grammar leaves one text only; None: as the model needs it.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    compile_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    compile_memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 256
    cache_mb: Annotated[int, msgspec.Meta(ge=1)] = 256
    num_checkers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    mask_time_ms: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    jump_ahead: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
