# SPDX-License-Identifier: Apache-2.0
"""Limits of requests to a pooling model, from what the model supports."""

from __future__ import annotations

from typing import Any

from quire.config.pooling import CLASS_TASKS, TOKEN_TASKS, PoolingSpec
from quire.entrypoints.openai.protocol.relations import asks_nothing, both, either, has

Schema = dict[str, Any]


def pooling_rules(spec: PoolingSpec) -> dict[str, dict[str, Schema]]:
    """Return the rules by field name, as in `Limits`."""
    allowed: Schema = (
        {"minimum": 1, "maximum": spec.size}
        if 0 in spec.matryoshka
        else {"enum": sorted({*spec.matryoshka, spec.size})}
    )
    return {
        "dimensions": {"integer": allowed},
        "output_dimension": {"integer": allowed},
        "task": {"string": {"enum": list(spec.tasks)}},
        "prompt_name": {"string": {"enum": ["", *(name for name, _ in spec.prompts)]}},
    }


def pooling_relations(spec: PoolingSpec) -> dict[str, tuple[Schema, ...]]:
    """Return relations by request model: fields that only some tasks allow (`PoolingSpec.check`, `embeddings.pool`)."""
    return {"PoolingRequest": (either(*(_of_task(spec, task) for task in spec.tasks)),)}


def _of_task(spec: PoolingSpec, task: str) -> Schema:
    named = asks_nothing("task", task) if task == spec.tasks[0] else has("task", {"const": task})
    limits = [named]
    if task in TOKEN_TASKS:
        limits.append(asks_nothing("encoding_format", "float"))
    if task in CLASS_TASKS:
        limits += [asks_nothing("dimensions"), _classes_below(spec.size_of(task))]
    else:
        limits.append(asks_nothing("returned_token_ids"))
    if spec.pooling != "step":
        limits.append(asks_nothing("step_tag_id"))
    return both(*limits)


def _classes_below(end: int) -> Schema:
    return {"properties": {"returned_token_ids": {"items": {"maximum": end - 1}}}}
