# SPDX-License-Identifier: Apache-2.0
"""Logs, statistics and traces."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError, ValidationError
from quire.version import install_command

MAX_PROFILED_STEPS = 1000


class ProfilerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys of --profiler-config, under vLLM's names.

    Args:
        profiler: "torch" or "cprofile"; None: no profiles.
        torch_profiler_dir: directory of the files of either profiler.
        torch_profiler_with_stack, torch_profiler_record_shapes, torch_profiler_with_memory: further contents of
            torch's traces.
        torch_profiler_use_gzip: compress them.
        max_iterations: steps after which a profile ends by itself.
    """

    profiler: Literal["torch", "cprofile"] | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = True
    max_iterations: Annotated[int, msgspec.Meta(ge=1)] = MAX_PROFILED_STEPS


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
    profiler_config: dict[str, Any] = option(
        {},
        'Profiles of steps (see observability.md), such as {"profiler": "torch", "torch_profiler_dir": "profiles"}.',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.profiler
        if settings.profiler is not None and not settings.torch_profiler_dir:
            raise ConfigError('--profiler-config needs a "torch_profiler_dir", the directory of the profiles')
        if settings.profiler is None and self.profiler_config.get("torch_profiler_dir"):
            raise ConfigError('--profiler-config needs a "profiler": "torch" or "cprofile"')

    @property
    def profiler(self) -> ProfilerSettings:
        """Parsed keys of `profiler_config`."""
        try:
            return msgspec.convert(self.profiler_config, ProfilerSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--profiler-config: {error}") from None

    def require_profiler(self) -> None:
        """Raise ValidationError unless the operator allows profiles."""
        if self.profiler.profiler is None:
            raise ValidationError(
                "the engine makes no profiles; start it with --profiler-config "
                '\'{"profiler": "torch", "torch_profiler_dir": "DIRECTORY"}\''
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
