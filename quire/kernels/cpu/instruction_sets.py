# SPDX-License-Identifier: Apache-2.0
"""Selection of the C++ kernels' instruction set; torch-free, so any process may use it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_char_p, c_int64
from itertools import count, takewhile
from pathlib import Path

from quire.errors import ConfigError

PATH = Path(os.environ.get("QUIRE_CPU_LIBRARY") or Path(__file__).with_name("libquire_cpu.so"))
"""Path of the library, if it was built; QUIRE_CPU_LIBRARY names another build of it."""


def available() -> bool:
    """Return whether the kernels were built and are not switched off; does not import torch."""
    return PATH.exists() and os.environ.get("QUIRE_KERNELS", "auto") != "reference"


VARIABLE = "QUIRE_CPU_ISA"
REFERENCE = "torch"


def arithmetic() -> str:
    """Return the CPU arithmetic of this process, which determines its bits: an instruction set, or torch alone.

    Raises:
        ConfigError: QUIRE_CPU_ISA names an unknown instruction set.
    """
    if not available():
        return REFERENCE
    return chosen_isa(missing_of_isas(ctypes.CDLL(str(PATH))), asked_for())


def asked_for() -> str:
    """Return the instruction set that the user requests; "auto": the best one."""
    return os.environ.get("QUIRE_CPU_ISA", "auto")


def missing_of_isas(handle: ctypes.CDLL) -> dict[str, str | None]:
    """Return why this machine lacks each instruction set, in the order of the library's table; None: supported."""
    name_of, missing_of = handle.quire_cpu_isa_name, handle.quire_cpu_isa_missing
    name_of.restype = missing_of.restype = c_char_p
    name_of.argtypes = missing_of.argtypes = (c_int64,)
    names = takewhile(bool, map(name_of, count()))
    return {name.decode(): _text(missing_of(index)) for index, name in enumerate(names)}


def chosen_isa(missing: Mapping[str, str | None], requested: str) -> str:
    """Return the instruction set whose kernels are used.

    Raises:
        ConfigError: this machine or build does not support it; the message names those that it does.
    """
    supported = [name for name, reason in missing.items() if reason is None]
    if requested == "auto":
        return supported[0]
    if requested not in supported:
        why = f" ({missing[requested]})" if requested in missing else ""
        choices = ", ".join(["auto", *supported])
        raise ConfigError(f"{VARIABLE} is {requested!r}{why}; this build on this CPU supports: {choices}")
    return requested


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
