# SPDX-License-Identifier: Apache-2.0
"""Ranks of one host with shared memory, through which kernels communicate without system calls.

Invariant: the memory is anonymous (Linux: memfd), so it is gone with the last process that maps it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
from collections.abc import Sequence
from ctypes import c_char, c_int32, c_int64, c_uint32

import torch
from torch import Tensor

from quire.distributed.group import COLLECTIVE_TIMEOUT_S, Group
from quire.errors import RankLostError
from quire.processes import why_silent

logger = logging.getLogger(__name__)

MAX_RANKS = 8
PIECE_BYTES = 1 << 18  # Bytes that a rank publishes at a time: two such pieces stay in its core's cache.
_NAME = "quire-ranks"
_POLL_S = 0.1  # Poll interval while waiting for a rank, as in csrc/cpu/segment.cpp.
_SLOTS = 4096  # Offset of the pieces.


class _Rank(ctypes.Structure):
    """`Rank` in csrc/cpu/segment.cpp."""

    _fields_ = (
        ("shown", c_uint32),
        ("_line", c_uint32 * 15),
        ("asleep", c_uint32),
        ("pid", c_int32),
        ("lost", c_int32),
        ("has_left", c_uint32),
        ("reason", c_char * 112),
    )


class _Segment(ctypes.Structure):
    """`Segment` in csrc/cpu/segment.cpp; from `_SLOTS` on there are two pieces of each rank."""

    _fields_ = (
        ("num_ranks", c_int64),
        ("piece_bytes", c_int64),
        ("patience", c_int64),
        ("tag", c_int64),
        ("_line", c_int64 * 4),
        ("ranks", _Rank * MAX_RANKS),
    )


class SharedMemory(Group):
    """Group of ranks with shared memory for the kernels (`quire.kernels.cpu.collectives`).

    Operations without a kernel use the wrapped group.

    Attributes:
        memory: uint8, the same for all ranks.
    """

    def __init__(self, group: Group, segment: mmap.mmap) -> None:
        super().__init__(group.rank, group.size, group.names)
        self._group = group
        self._header = _Segment.from_buffer(segment)
        self.memory = torch.frombuffer(segment, dtype=torch.uint8)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._group.all_gather(x)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self._group.all_to_all(parts)

    def send(self, x: Tensor, to: int) -> None:
        self._group.send(x, to)

    def recv(self, out: Tensor, source: int) -> None:
        self._group.recv(out, source)

    def close(self, reason: str = "it has ended") -> None:
        own = self._header.ranks[self.rank]
        if not own.has_left:
            own.reason = reason.encode()[:111]
            own.has_left = 1
        self._group.close(reason)

    def why_not_captured(self) -> str | None:
        return None

    def loss(self, rank: int) -> RankLostError:
        """Return the error for a rank that a kernel has waited for in vain."""
        other = self._header.ranks[rank]
        if other.has_left:
            return self.lost_error([rank], other.reason.decode(errors="replace"))
        trouble = why_silent(other.pid) or f"did not answer within {self._header.patience * _POLL_S:g} s"
        return self.lost_error([rank], f"process {other.pid} {trouble}")


def share_memory(
    group: Group, *, able: bool = True, piece_bytes: int = PIECE_BYTES, answer_s: float = COLLECTIVE_TIMEOUT_S
) -> Group:
    """Give the ranks of a group shared memory; returns the group itself if not all ranks can have it.

    Args:
        able: whether this rank has kernels for it.
        answer_s: seconds to wait for a rank whose process runs.
    """
    able = able and group.size <= MAX_RANKS and hasattr(os, "memfd_create")
    num_bytes, tag = _SLOTS + 2 * group.size * piece_bytes, secrets.randbits(62)
    made = -1
    if able and group.rank == 0:
        patience = max(1, round(answer_s / _POLL_S))
        made = _made(
            num_bytes, _Segment(num_ranks=group.size, piece_bytes=piece_bytes, patience=patience, tag=tag)
        )
    try:
        offers = group.all_gather(torch.tensor([os.getpid(), made, tag]))
        pid, file, number = map(int, offers[0])
        segment = _opened(pid, file, number, num_bytes) if able else None
        if segment is not None:
            _Segment.from_buffer(segment).ranks[group.rank].pid = os.getpid()
        have_it = group.all_gather(torch.tensor([segment is not None]))
    finally:
        if made >= 0:
            os.close(made)
    if segment is None or not all(map(bool, have_it)):
        logger.info("rank %d: the ranks have no shared memory", group.rank)
        return group
    return SharedMemory(group, segment)


def _made(num_bytes: int, header: _Segment) -> int:
    """Create an anonymous file; -1 if the system refuses it."""
    file = -1
    try:
        file = os.memfd_create(_NAME)
        os.truncate(file, num_bytes)
        os.pwrite(file, bytes(header), 0)
    except OSError as error:
        logger.info("ranks cannot share memory and use sockets: %s", error)
        if file >= 0:
            os.close(file)
        return -1
    return file


def _opened(pid: int, file: int, tag: int, num_bytes: int) -> mmap.mmap | None:
    """Map another process's file; None if it has none, or is on another host."""
    path = f"/proc/{pid}/fd/{file}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            return None
        with open(path, "r+b", buffering=0) as opened:
            segment = mmap.mmap(opened.fileno(), num_bytes)
    except OSError as error:
        logger.info("the ranks' memory cannot be opened: %s", error)
        return None
    return segment if _Segment.from_buffer(segment).tag == tag else None
