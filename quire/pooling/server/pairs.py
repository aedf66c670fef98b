# SPDX-License-Identifier: Apache-2.0
"""POST /score, /v1/score, /rerank, /v1/rerank and /v2/rerank"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.config import EngineConfig
from quire.entrypoints.openai.errors import json_response
from quire.entrypoints.openai.openapi.operation import Operation, describe
from quire.entrypoints.openai.parsing import read_request
from quire.entrypoints.openai.tenant import READ_HEADERS
from quire.errors import ValidationError
from quire.pooling.inputs import Compose
from quire.pooling.server.protocol import (
    MAX_INPUTS,
    DocumentText,
    PairFields,
    Ranked,
    Ranking,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    beside_numbers,
)
from quire.pooling.server.run import Pooled, PoolingJob, renamed_param, text_options
from quire.pooling.server.scoring import Scoring, scoring_task, template_composer

router = APIRouter()
ERRORS = (404, 504)

_SIDES = frozenset(name for names in ScoreRequest.NAMES for name in names)


def offered(config: EngineConfig) -> bool:
    """Return whether the model scores pairs."""
    return config.pooling is not None and scoring_task(config.pooling) is not None


@router.post("/score")
@router.post("/v1/score")
@describe(Operation((ScoreRequest,), ScoreList, errors=ERRORS, headers=READ_HEADERS))
async def score(request: Request) -> Response:
    """Score pairs of texts: one with each of several, or several with equally many."""
    body = await read_request(request, ScoreRequest)
    job = PoolingJob.of(request, body, "score-")
    (first, firsts), (second, seconds) = _texts_of(body)
    if len(firsts) not in (1, len(seconds)):
        raise ValidationError(
            f"{first} has {len(firsts)} texts and {second} {len(seconds)}; {first} must have one, or as many",
            param=first,
        )
    pooled, scores = await _scored(job, body, firsts, seconds, (first, second))
    data = [Score(index=index, score=one) for index, one in enumerate(scores)]
    return json_response(ScoreList(data=data, **job.head(pooled)))


@router.post("/rerank")
@router.post("/v1/rerank")
@describe(Operation((RerankRequest,), Ranking, errors=ERRORS, headers=READ_HEADERS))
async def rerank(request: Request) -> Response:
    """Rank documents by relevance to a query, best first, in Jina's form."""
    return await _rank(request, with_documents=True)


@router.post("/v2/rerank")
@describe(Operation((RerankRequest,), Ranking, errors=ERRORS, headers=READ_HEADERS))
async def rerank_v2(request: Request) -> Response:
    """Rank documents by relevance to a query, best first, in Cohere's form: without texts by default."""
    return await _rank(request, with_documents=False)


async def _rank(request: Request, *, with_documents: bool) -> Response:
    body = await read_request(request, RerankRequest)
    job = PoolingJob.of(request, body, "rerank-")
    documents = _documents_of(body.documents)
    pooled, scores = await _scored(job, body, [body.query], documents, ("query", "documents"))
    shown = with_documents if body.return_documents is None else body.return_documents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        Ranked(index, scores[index], DocumentText(documents[index]) if shown else UNSET) for index in order
    ]
    head = job.head(pooled)
    del head["created"]  # Jina's and Cohere's replies have no such field
    return json_response(Ranking(results=results, **head))


async def _scored(
    job: PoolingJob, body: PairFields, firsts: list[str], seconds: list[str], names: tuple[str, str]
) -> tuple[list[Pooled], list[float]]:
    """Return the pooled outputs of the pairs, and their scores; `names` are the request's fields of the two sides."""
    limits = (body.max_tokens_per_query, body.max_tokens_per_doc)
    with renamed_param(names[1]):
        options = text_options(body, max_tokens_per_text=limits)
        scoring = Scoring(job.inputs, firsts, seconds, options, _composer(job))
        num_chars = sum(map(len, firsts)) + sum(map(len, seconds))
        pooled = await job.run(scoring.params(body.use_activation), num_chars, scoring.prompts)
    scores = await beside_numbers(pooled, lambda: [one for one, _ in scoring.outputs(pooled)])
    return pooled, scores


def _composer(job: PoolingJob) -> Compose | None:
    """Return the composer of pairs by the server's chat template, for models that need one."""
    options = job.inputs.spec.template_options
    if options is None:
        return None
    return template_composer(job.server.form.chat_template, job.server.form.tokenizer, dict(options))


def _texts_of(body: ScoreRequest) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
    """Return the two sides, each with its field name."""
    given = [name for name in type(body).model_fields if name in _SIDES and getattr(body, name) is not None]
    for first, second in ScoreRequest.NAMES:
        if {first, second} == {*given}:
            return (first, _texts(body, first)), (second, _texts(body, second))
    forms = " or ".join(f"{first} and {second}" for first, second in ScoreRequest.NAMES)
    raise ValidationError(f"a score needs {forms}", param=given[0] if given else ScoreRequest.NAMES[0][0])


def _texts(body: ScoreRequest, name: str) -> list[str]:
    value: Any = getattr(body, name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValidationError(f"{name} must be text or a list of texts", param=name)
    return _checked(texts, name)


def _documents_of(value: Any) -> list[str]:
    is_list = isinstance(value, list)
    texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in value] if is_list else []
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ValidationError(
            "documents must be a list of texts, or of objects with a text", param="documents"
        )
    return _checked(texts, "documents")


def _checked(texts: list[str], name: str) -> list[str]:
    if not 1 <= len(texts) <= MAX_INPUTS:
        raise ValidationError(f"{name} has {len(texts)} texts; 1 to {MAX_INPUTS} are allowed", param=name)
    if not all(texts):
        raise ValidationError(f"{name} has an empty text at {texts.index('')}", param=name)
    return texts
