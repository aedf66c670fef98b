# SPDX-License-Identifier: Apache-2.0
"""Logs, statistics and traces."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from quire.config.fields import Config, option
from quire.errors import ConfigError
from quire.version import install_command


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
    enable_progress: bool = option(
        True, "Progress while loading: a bar on a terminal, elsewhere a log line every 5 seconds."
    )

    def check(self) -> None:
        """Reject a trace endpoint that cannot be used.

        Raises:
            ConfigError: it is no URL, or OpenTelemetry is not installed.
        """
        endpoint = self.otlp_traces_endpoint
        if not endpoint:
            return
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"--otlp-traces-endpoint must be a URL, such as http://localhost:4318/v1/traces, got {endpoint!r}"
            )
        if not _is_installed("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed: {install_command('otel')}"
            )


def _is_installed(*modules: str) -> bool:
    try:
        return all(find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # a parent package is missing
        return False
