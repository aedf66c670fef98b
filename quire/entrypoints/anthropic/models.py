"""The served models in the form of Anthropic's API, which its clients ask for under the same paths as OpenAI's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.datastructures import QueryParams

from quire.errors import NotFoundError, ValidationError

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


class AnthropicModel(msgspec.Struct, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(msgspec.Struct, kw_only=True):
    """One page; the ids are those of its first and last model."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_of(name: str, created: int, max_model_len: int) -> AnthropicModel:
    """Return one model."""
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created_at,
        max_input_tokens=max_model_len,
        max_tokens=max_model_len,
    )


def limit_of(query: QueryParams) -> int:
    """Return the number of models on a page.

    Raises:
        ValidationError: it is no integer, out of range, or given twice.
    """
    given = query.getlist("limit")
    if not given:
        return DEFAULT_LIMIT
    text = ",".join(given)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ValidationError(
            f"limit must be one integer from 1 to {MAX_LIMIT}, got {text!r:.40}", param="limit"
        )
    return limit


def page_of(models: list[AnthropicModel], query: QueryParams, limit: int) -> AnthropicModelList:
    """Return the page that a query asks for: `limit` models behind `after_id`, or the last ones before `before_id`.

    Raises:
        NotFoundError: no model has such an id.
    """
    after, before = query.get("after_id"), query.get("before_id")
    ids = [model.id for model in models]
    start = 0 if after is None else _place(ids, after, "after_id") + 1
    end = len(ids) if before is None else _place(ids, before, "before_id")
    if after is None and before is not None:
        return _page(models[max(0, end - limit) : end], has_more=end > limit)
    return _page(models[start:end][:limit], has_more=end - start > limit)


def _page(models: list[AnthropicModel], *, has_more: bool) -> AnthropicModelList:
    first, last = (models[0].id, models[-1].id) if models else (None, None)
    return AnthropicModelList(data=models, has_more=has_more, first_id=first, last_id=last)


def _place(ids: list[str], wanted: str, param: str) -> int:
    if wanted not in ids:
        raise NotFoundError(f"{param} must be the id of a served model, got {wanted!r:.100}", param=param)
    return ids.index(wanted)
