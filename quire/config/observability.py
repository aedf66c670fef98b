"""What the engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class ObservabilityConfig(Config):
    """Logs, statistics, traces and progress."""

    log_level: str | None = option(
        None,
        "Lowest level in the log (stderr) of commands and core processes; default: QUIRE_LOG_LEVEL, else info.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    log_format: str | None = option(
        None,
        "Lines of the log: for people, or one JSON object each; default: QUIRE_LOG_FORMAT, else text.",
        choices=("text", "json"),
    )
    disable_log_stats: bool = option(False, "No periodic statistics line in the log.")
    log_stats_interval: float = option(10.0, "Seconds between statistics lines.", gt=0.0)
    record_trace: str = option(
        "",
        "Record arrivals, plans and step times to this file, for `quire trace`; it holds prompts and answers.",
        metavar="FILE",
    )
    otlp_traces_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span for every request; needs the extra otel.",
        metavar="URL",
    )
    enable_progress: bool = option(True, "Progress bars while loading (only on a terminal).")
