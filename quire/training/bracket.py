# SPDX-License-Identifier: Apache-2.0
"""Weight updates of one engine, without the engine: at most one open bracket, its source and the weights in use.

Invariant: torch-free and blocking; the caller serializes calls. The directory of the weights in use stays until others
are in use, since a core that starts later, or wakes from level 2, reads it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.sleep_state import MODES
from quire.errors import ConflictError, ValidationError
from quire.models.gguf.model import is_gguf
from quire.training.staging import StagedWeights
from quire.training.tensors import MAX_NAME_CHARS, TensorSpec, read_specs, total_bytes
from quire.training.transports import WeightStream, open_segment, read_address

logger = logging.getLogger(__name__)

MAX_PARTS = 10_000


MIXED = "mixed"
UPDATE_MODES = (*MODES, MIXED)
"""Fates of requests in flight: those of a pause, or kept with all that the old weights have computed."""


@dataclass(frozen=True)
class Bracket:
    """Open update.

    Attributes:
        resumes: whether the update has paused the engine, and its end resumes it.
        is_mixed: whether requests in flight keep what the old weights have computed.
    """

    update_id: str
    staged: StagedWeights
    resumes: bool
    is_mixed: bool = False


class Brackets:
    """Brackets of one engine.

    Args:
        config: prepared.
        addresses: addresses to which TCP connections are allowed; None: all.
    """

    def __init__(self, config: EngineConfig, addresses: Sequence[str] | None) -> None:
        self._config = config
        self._addresses = addresses
        self._open: Bracket | None = None
        self._in_use: StagedWeights | None = None
        self._stream: WeightStream | None = None
        self._num_finished = 0

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def check_can_begin(self) -> None:
        """Raise ConflictError if an update is open, ValidationError if this engine's weights cannot be replaced."""
        if self._open is not None:
            raise ConflictError("a weight update is open: finish or abort it first")
        _check_replaceable(self._config)

    def begin(self, mode: str, *, resumes: bool) -> str:
        """Open a bracket of an update mode and return its id."""
        self.check_can_begin()
        staged = StagedWeights(Path(self._config.model_dir))
        self._open = Bracket(secrets.token_hex(8), staged, resumes, mode == MIXED)
        return self._open.update_id

    def get(self, update_id: str | None = None) -> Bracket:
        """Return the open bracket.

        Raises:
            ConflictError: there is none, or another one than the given.
        """
        if self._open is None:
            raise ConflictError("no weight update is open: start one first")
        if update_id not in (None, self._open.update_id):
            raise ConflictError("the open weight update is another one")
        return self._open

    def add(self, info: Any, update_id: str | None = None) -> None:
        """Add what an `update_info`, or each of a list, describes. One that fails adds nothing.

        Raises:
            ValidationError: it is malformed, or its source does not have what it names.
        """
        staged = self.get(update_id).staged
        parts = info if isinstance(info, list) else [info]
        if not 0 < len(parts) <= MAX_PARTS:
            raise ValidationError(
                f"update_info has {len(parts)} parts, not 1 to {MAX_PARTS}", param="update_info"
            )
        for part in parts:
            self._add_part(staged, part)

    def _add_part(self, staged: StagedWeights, part: Any) -> None:
        if not isinstance(part, Mapping):
            raise ValidationError("update_info must be an object or a list of objects", param="update_info")
        if "path" in part:
            staged.link(read_path(part["path"]))
            return
        specs = read_specs(part)
        if "segment" in part:
            with open_segment(part["segment"], total_bytes(specs)) as fill:
                staged.write(specs, fill)
        else:
            self._receive(staged, specs)

    def _receive(self, staged: StagedWeights, specs: Sequence[TensorSpec]) -> None:
        if self._stream is None:
            raise ValidationError(
                "update_info has neither a path nor a segment, and no trainer is connected (init_info with an address)",
                param="update_info",
            )
        try:
            self._stream.expect(total_bytes(specs))
            staged.write(specs, self._stream.fill)
        except BaseException:  # what follows in the stream is of unknown length
            self.disconnect()
            raise

    def close(self, update_id: str | None = None) -> Bracket:
        """End the open bracket; its weights are the caller's to use or to close."""
        bracket = self.get(update_id)
        self._open = None
        return bracket

    def used(self, staged: StagedWeights) -> None:
        """Note that these weights are in use."""
        if self._in_use is not None:
            self._in_use.close()
        self._in_use = staged
        self._num_finished += 1

    def next_version(self, given: str | None) -> str:
        """Return the version of the next weights: as given, or a number."""
        return f"update-{self._num_finished + 1}" if given is None else read_version(given)

    def connect(self, init_info: Any) -> None:
        """Connect to the trainer of an `init_info`, in place of any before.

        Raises:
            ValidationError: it is malformed, or the address is not allowed.
            UnavailableError: the trainer does not answer.
        """
        address = _address_of(init_info)
        host, port = read_address(address, self._addresses)
        self.disconnect()
        self._stream = WeightStream(host, port)
        logger.info("weight updates: connected to the trainer at %s", address)

    def disconnect(self) -> None:
        """Close the connection to the trainer, if there is one."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def shutdown(self) -> None:
        """Remove all directories."""
        self.disconnect()
        for staged in (self._in_use, None if self._open is None else self._open.staged):
            if staged is not None:
                staged.close()
        self._in_use = self._open = None


def pause_mode(mode: Any) -> str:
    """Return the mode of the pause during an update.

    Raises:
        ValidationError: there is no such update mode.
    """
    if mode not in UPDATE_MODES:
        raise ValidationError(
            f"mode must be one of {', '.join(UPDATE_MODES)}, got {mode!r:.100}", param="mode"
        )
    return "keep" if mode == MIXED else str(mode)


def read_version(text: Any) -> str:
    """Return a version that fits a header.

    Raises:
        ValidationError: it does not.
    """
    if not isinstance(text, str) or not 0 < len(text) <= 128 or not (text.isascii() and text.isprintable()):
        raise ValidationError(
            "weight_version must be 1 to 128 printable ASCII characters", param="weight_version"
        )
    return text


def read_path(text: Any) -> Path:
    """Return the absolute path of a directory with weights.

    Raises:
        ValidationError: it is none.
    """
    if (
        not isinstance(text, str)
        or len(text) > 8 * MAX_NAME_CHARS
        or not text.startswith("/")
        or "\0" in text
    ):
        raise ValidationError("path must be absolute, of a directory with *.safetensors", param="update_info")
    path = Path(text)
    try:
        is_there = path.is_dir() or path.is_file()
    except OSError:
        is_there = False
    if not is_there:
        raise ValidationError(f"path {text!r:.200} does not exist", param="update_info")
    return path


def _address_of(info: Any) -> Any:
    given: Mapping[str, Any] = info if isinstance(info, Mapping) else {}
    if given.get("backend", "tcp") != "tcp":
        raise ValidationError(
            f"backend {given['backend']!r:.40} is not supported: there are tcp, and directories and segments of shared "
            "memory, which need no connection",
            param="init_info",
        )
    if "address" in given:
        return given["address"]
    if given.get("backend") == "tcp" and "master_address" in given:
        return f"{given['master_address']}:{given.get('master_port')}"
    raise ValidationError(
        'init_info must be {"backend": "tcp", "address": "host:port"}; NCCL groups are not supported',
        param="init_info",
    )


def _check_replaceable(config: EngineConfig) -> None:
    parallel, why = config.parallel, ""
    if is_gguf(Path(config.model_dir)):
        why = (
            "the model is a GGUF file, whose quantized weights a trainer does not have; serve its safetensors"
        )
    elif parallel.nnodes > 1 or parallel.remote_replicas or parallel.distributed_executor_backend == "ray":
        why = "ranks or replicas run on other hosts"
    elif config.kv_store.transfer is not None:
        why = "--kv-transfer-config shares blocks with engines that keep the old weights"
    if why:
        raise ValidationError(f"weights cannot be replaced here: {why}")
