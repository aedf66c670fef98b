# SPDX-License-Identifier: Apache-2.0
"""Pooling of many prompts by an asynchronous engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.async_llm import FrontEndAccess
from quire.inputs import PromptType
from quire.pooling.collector import PoolingCollector
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams, TextOptions


async def encode_all(
    access: FrontEndAccess,
    prompts: Sequence[PromptType],
    params: PoolingParams,
    request_ids: Sequence[str],
    options: TextOptions,
    terms: Mapping[str, Any],
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """Return the pooled output of each prompt, in order; see `AsyncLLM.encode_all`.

    Args:
        terms: keywords of `FrontEnd.submit`.
    """
    front_end = access.front_end
    window = 2 * front_end.config.scheduler.max_num_seqs
    collector, names = PoolingCollector(len(prompts)), list[str]()
    with access.admission.reserve(min(len(prompts), window)) as reserved:
        tokenized = [await access.tokenize(prompt, terms["lora_request"], options) for prompt in prompts]
        access.admission.check_tokens(reserved, sum(len(one.token_ids) for one in tokenized[:window]))
    try:
        while collector.num_missing:
            num_open = collector.num_missing - (len(prompts) - len(names))
            for place in range(len(names), min(len(names) + window - num_open, len(prompts))):
                name, messages = front_end.submit(
                    request_ids[place], tokenized[place], params, collector.sink(place), **terms
                )
                names.append(name)
                access.send(messages)
            access.expire()  # the deadlines may have passed
            await collector.news()
        return collector.all()
    finally:
        for name in names:
            access.send(front_end.release(name))
