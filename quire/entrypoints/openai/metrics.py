# SPDX-License-Identifier: Apache-2.0
"""GET /metrics"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.exposition import MergedMetrics, families_of
from quire.entrypoints.openai.state import ServerState, server_of
from quire.metrics.catalog import VllmNames

router = APIRouter()
QUERY = "metrics"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics of the server's processes in Prometheus's text format."""
    server = server_of(request)
    alone = server.siblings is None
    source = server.registry if alone else MergedMetrics(await server.ask_all(QUERY))
    shown = VllmNames(source) if server.config.metrics_compat == "vllm" else source
    return Response(generate_latest(shown), media_type=CONTENT_TYPE_LATEST)


async def measured(server: ServerState) -> list[Any]:
    """Return this process's metrics."""
    return families_of(server.registry)
