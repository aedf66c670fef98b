"""JSON answers from msgspec structs."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
