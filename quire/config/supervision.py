"""What becomes of an engine core that dies or hangs."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option

BUSY_FACTOR = 20
"""So many timeouts may a core compute without a step: the first of a large model take minutes on a small machine."""


@dataclass(frozen=True)
class SupervisionConfig(Config):
    """The watch over a core that runs in a process of its own."""

    on_core_death: str = option(
        "resume",
        "What becomes of requests when a core dies: resume: they go on in a new one, with the tokens of an undisturbed "
        "run; error: they end.",
        choices=("resume", "error"),
    )
    core_heartbeat_timeout: float = option(
        30.0,
        "Seconds without a step and without computing after which a core has hung; one that computes has longer. "
        "0: no limit.",
        ge=0.0,
    )

    @property
    def longest_step_s(self) -> float | None:
        """How long a core may take over a step before any longer one is known; None: as long as it likes."""
        return BUSY_FACTOR * self.core_heartbeat_timeout or None
