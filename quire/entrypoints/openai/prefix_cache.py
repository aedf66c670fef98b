"""POST /reset_prefix_cache, for the admin key: whoever may ask can slow everybody else down."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.admin import admin_router
from quire.entrypoints.openai.json_response import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.protocol.responses import PrefixCacheReset
from quire.entrypoints.openai.state import server_of
from quire.errors import ConflictError, ValidationError

controls = admin_router()


@controls.post("/reset_prefix_cache")
@describe(Operation(reply=PrefixCacheReset, errors=(409,)))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes. 409, and nothing forgotten, while a request is running: ask again later."""
    for name in request.query_params:
        raise ValidationError("this route has no options", param=name[:64])
    if not await server_of(request).engine.reset_prefix_cache():
        raise ConflictError("the prefix cache was not reset: requests are running")
    return json_response(PrefixCacheReset())
