# SPDX-License-Identifier: Apache-2.0
"""Files of `deploy/`: they parse, name what exists, and ask for what the server does."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.config import ServerConfig
from quire.metrics.catalog import METRICS
from tools import dashboard

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
NAMES = {f"quire:{metric.name}{suffix}" for metric in METRICS for suffix in SUFFIXES[metric.kind]}
LABELS = {
    f"quire:{metric.name}{suffix}": metric.labels for metric in METRICS for suffix in SUFFIXES[metric.kind]
}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def queries() -> Iterator[str]:
    """Every PromQL expression of the kit."""
    for group in load(COMPOSE / "alerts.yaml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(dashboard.FILE.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for path in [*DEPLOY.rglob("*.yaml")]:
        yield from re.findall(r"query: (.*)", path.read_text(encoding="utf-8"))


def test_dashboard_is_that_of_its_tool() -> None:
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text(), "run python tools/dashboard.py"


def test_queries_name_metrics_and_labels_that_exist() -> None:
    found = list(queries())
    assert len(found) > 25
    for query in found:
        names = set(re.findall(r"quire:\w+", query))
        assert names <= NAMES, names - NAMES
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r",\s*", by)}
        known = {label for name in names for label in LABELS[name]} | {"le"}
        assert grouped <= known, query


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_is_small_unprivileged_and_stops_by_drain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert lines[0].startswith("ARG PYTHON_IMAGE=")
    result = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER 65534:65534" in result
    assert "STOPSIGNAL SIGTERM" in result
    assert any("/livez" in line for line in result if line.startswith("HEALTHCHECK") or "urlopen" in line)
    assert 'ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0"]' in result
    assert not any("g++" in line for line in result)
    for source in re.findall(r"RUN sh (\S+)", text):
        assert (ROOT / source).is_file()


def test_compose_mounts_exist_and_stop_time_allows_drain() -> None:
    services = load(COMPOSE / "compose.yaml")["services"]
    quire = services["quire"]
    assert (COMPOSE / quire["build"]["context"] / quire["build"]["dockerfile"]).is_file()
    assert quire["read_only"]
    assert int(quire["stop_grace_period"].removesuffix("s")) > ServerConfig().shutdown_timeout
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (COMPOSE / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    scraped = load(COMPOSE / "prometheus.yaml")
    assert all((COMPOSE / name).is_file() for name in scraped["rule_files"])
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["quire:8000"]


def test_service_unit_notifies_drains_and_keeps_a_watchdog() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd/quire.service")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"].removesuffix("s")) > ServerConfig().shutdown_timeout
    assert service["ProtectSystem"] == "strict"
    program, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "quire"
    assert arguments == ["serve", "--config", "/etc/quire/serve.yaml"]


def test_service_options_are_options_of_serve() -> None:
    from quire.entrypoints.cli.serve import serve

    known = {name.removeprefix("--") for param in serve.params for name in param.opts}
    assert set(load(DEPLOY / "systemd/serve.yaml")) <= known | {"model"}


def test_proxies_pass_streams_at_once() -> None:
    nginx, caddy = (DEPLOY / "proxy/nginx.conf").read_text(), (DEPLOY / "proxy/Caddyfile").read_text()
    assert "proxy_buffering off" in nginx
    assert "flush_interval -1" in caddy
    for text in (nginx, caddy):
        assert text.count("{") == text.count("}")
        assert "/metrics" in text
