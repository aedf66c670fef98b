"""What the engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class ObservabilityConfig(Config):
    """Statistics and progress."""

    disable_log_stats: bool = option(False, "No periodic statistics line in the log.")
    log_stats_interval: float = option(10.0, "Seconds between statistics lines.", gt=0.0)
    record_trace: str = option(
        "",
        "Record arrivals, plans and step times to this file, for `quire trace`; it holds prompts and answers.",
        metavar="FILE",
    )
    enable_progress: bool = option(True, "Progress bars while loading (only on a terminal).")
