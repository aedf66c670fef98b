"""What becomes of an engine core that dies or hangs."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class SupervisionConfig(Config):
    """The watch over a core that runs in a process of its own."""

    on_core_death: str = option(
        "resume",
        "What happens to a server's requests in flight when a core dies: resume: they go on in a new core, with the "
        "tokens they would have had anyway; error: they end with an error.",
        choices=("resume", "error"),
    )
    core_heartbeat_timeout: float = option(
        30.0,
        "Seconds without a step and without use of a processor after which a core counts as hung and is ended; one "
        "that computes has 20 times that, or 10 times its longest step. 0: it may hang.",
        ge=0.0,
    )
