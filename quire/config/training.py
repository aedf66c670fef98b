# SPDX-License-Identifier: Apache-2.0
"""Options of training loops that use the engine (docs/training.md)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class TrainingConfig(Config):
    """Weight updates while serving, and calls of the workers (docs/training.md)."""

    worker_extension_cls: str = option(
        "",
        "Class, as module:Class, whose methods /collective_rpc and LLM.collective_rpc may call on each worker.",
        places=True,
    )
    weight_transfer_addresses: tuple[str, ...] = option(
        (),
        "Addresses HOST:PORT, with commas between, to which the server may connect for new weights.",
        metavar="ADDRESSES",
    )
    weight_update_timeout: float = option(
        600.0,
        "Seconds without a message after which an open weight update is aborted and the old weights go on.",
        gt=0.0,
    )
