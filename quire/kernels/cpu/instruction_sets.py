"""Which instruction set the C++ kernels are for on this machine: torch-free, so any process may ask."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import c_char_p, c_int64
from itertools import count, takewhile

from quire.errors import ConfigError
from quire.kernels import cpu

VARIABLE = "QUIRE_CPU_ISA"
REFERENCE = "torch"


def arithmetic() -> str:
    """By what this process computes on the CPU, which its bits depend on: an instruction set, or torch alone.

    Raises:
        ConfigError: QUIRE_CPU_ISA names an instruction set that there is not.
    """
    if not cpu.available():
        return REFERENCE
    return chosen_isa(missing_of_isas(ctypes.CDLL(str(cpu.PATH))), asked_for())


def asked_for() -> str:
    """The instruction set that the user wants; "auto": the best one."""
    return os.environ.get("QUIRE_CPU_ISA", "auto")


def missing_of_isas(handle: ctypes.CDLL) -> dict[str, str | None]:
    """What keeps this machine from each instruction set, in the order of the library's table; None: nothing."""
    name_of, missing_of = handle.quire_cpu_isa_name, handle.quire_cpu_isa_missing
    name_of.restype = missing_of.restype = c_char_p
    name_of.argtypes = missing_of.argtypes = (c_int64,)
    names = takewhile(bool, map(name_of, count()))
    return {name.decode(): _text(missing_of(index)) for index, name in enumerate(names)}


def chosen_isa(missing: Mapping[str, str | None], requested: str) -> str:
    """The instruction set of which kernels are used.

    Raises:
        ConfigError: this machine, or this build, has no such one; the message names those that it has.
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
