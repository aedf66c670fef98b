"""Grafana dashboard of quire's metrics: `python tools/dashboard.py` writes it to deploy/compose/grafana/dashboards/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy/compose/grafana/dashboards/quire.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
MODEL = 'model_name=~"$model"'
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
HTTP_RATE = "sum by (status) (rate(quire:http_requests_total[$__rate_interval]))"


def rate(counter: str, by: str = "") -> str:
    """Return the rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate(quire:{counter}_total{{{MODEL}}}[$__rate_interval]))"


def gauge(name: str, by: str = "") -> str:
    """Return the sum of a gauge."""
    return f"sum{f' by ({by})' if by else ''} (quire:{name}{{{MODEL}}})"


def quantiles(histogram: str) -> dict[str, str]:
    """Return the quantiles of a histogram: legend -> query."""
    buckets = f"sum by (le) (rate(quire:{histogram}_bucket{{{MODEL}}}[$__rate_interval]))"
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


# Panel: title, unit, legend -> query.
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Requests",
        "short",
        {"running": gauge("num_requests_running"), "waiting": gauge("num_requests_waiting")},
    ),
    ("Why requests wait", "short", {"{{reason}}": gauge("num_requests_waiting_by_reason", "reason")}),
    (
        "Tokens per second",
        "short",
        {
            "prompt": rate("prompt_tokens"),
            "from cache": rate("prompt_tokens_cached"),
            "generated": rate("generation_tokens"),
        },
    ),
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("e2e_request_latency_seconds")),
    ("Queue time", "s", quantiles("request_queue_time_seconds")),
    ("KV cache in use", "percentunit", {"engine {{engine}}": f"quire:kv_cache_usage_perc{{{MODEL}}}"}),
    (
        "Prefix cache hit rate",
        "percentunit",
        {"hits": f"{rate('prefix_cache_hits')} / {rate('prefix_cache_queries')}"},
    ),
    (
        "Finished requests per second",
        "short",
        {"{{finished_reason}}": rate("request_success", "finished_reason")},
    ),
    ("Refused requests per second", "short", {"{{reason}}": rate("admission_rejections", "reason")}),
    ("Preemptions per second", "short", {"preemptions": rate("num_preemptions")}),
    ("HTTP responses per second", "short", {"{{status}}": HTTP_RATE}),
    ("Engine cores up", "short", {"engine {{engine}}": f"quire:engine_core_up{{{MODEL}}}"}),
    (
        "Accepted draft tokens",
        "percentunit",
        {"accepted": f"{rate('spec_decode_num_accepted_tokens')} / {rate('spec_decode_num_draft_tokens')}"},
    ),
)


def panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    """Return one time series, at its place in the grid."""
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(queries.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    model = {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": "label_values(quire:num_requests_running, model_name)",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "uid": "quire",
        "title": "quire",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [model]},
        "panels": [panel(number, *fields) for number, fields in enumerate(PANELS)],
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
