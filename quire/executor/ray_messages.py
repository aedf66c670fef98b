"""What an engine and its process that knows Ray say to each other: frames of msgspec, as to ranks."""

from __future__ import annotations

import msgspec

from quire.executor.messages import Failed


class Wanted(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Find places for what this configuration, as `EngineConfig.encoded` says it, wants of Ray."""

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
    """Which host each rank, or replica, has, in their order; ranks of one host stand side by side."""


class Come(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Start all ranks; this is where the engine lets them in, and by what it knows them."""

    address: str
    port: int
    key: str


class Bring(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Start a replica, for the first time or again; this is where the server lets it in."""

    replica: int
    address: str
    port: int


class Lost(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """An actor has ended, with its rank, or replica, of this number."""

    number: int
    said: str


FromRay = Placed | Lost | Failed
