"""What an engine core and the process that knows Ray say to each other: frames of msgspec, as to ranks."""

from __future__ import annotations

import msgspec

from quire.executor.messages import Failed


class Wanted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Find a place for the ranks of this configuration, as `EngineConfig.encoded` says it."""

    config: bytes
    directory: str
    """Where a Ray of its own writes."""
    patience_s: float
    """How long to wait for room."""


class Placed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """There is one for each."""

    address: str
    """Of the engine's host, as all hosts reach it."""
    hosts: list[str]
    """Which host each rank has, in their order: those of one host stand side by side."""


class Come(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Start them; this is where the engine lets them in, and by what it knows them."""

    address: str
    port: int
    key: str


class Lost(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An actor has ended, with its rank."""

    rank: int
    said: str


FromRay = Placed | Lost | Failed
