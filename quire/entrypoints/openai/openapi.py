"""Request schemas for /openapi.json, which FastAPI cannot see because bodies are read by `parsing`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_schema(*models: type[BaseModel]) -> dict[str, Any]:
    """What a route with one of these bodies passes as `openapi_extra`."""
    schemas = [_inlined(model.model_json_schema()) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references: they would point nowhere inside the larger document."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: resolve(value) for key, value in node.items()}

    resolved = resolve(schema)
    assert isinstance(resolved, dict)
    return resolved
