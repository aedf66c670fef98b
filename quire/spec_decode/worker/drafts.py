# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts: a step samples after each draft token, and counts the samples that agree.

Invariant: a request's output is the same as without drafts. After each draft token the step samples what it would
sample if all tokens before were the request's, and that counts only where they are. So verification is a comparison,
whatever shapes sampling.

After Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with the sampled token
itself in place of a test that only preserves its distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.config.speculative import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import StartupError
from quire.kv_cache.spec import KVCacheConfig
from quire.spec_decode.drafter import Drafter, make_drafters
from quire.spec_decode.speculation import Speculation
from quire.spec_decode.step_costs import Clocks
from quire.spec_decode.worker.head_chain import HeadChain, Medusa
from quire.spec_decode.worker.jump_ahead import jump_ahead
from quire.spec_decode.worker.proposer import ModelProposer, uses_draft_heads
from quire.spec_decode.worker.recurrent_draft import make_draft_model
from quire.worker.input_batch import InputBatch
from quire.worker.sampler import Sampler

DRAFT_PREFIX = "draft."  # prefix of the draft model's layer names
MODEL_PROPOSERS: Mapping[str, Callable[..., ModelProposer]] = {
    DRAFT_MODEL: make_draft_model,
    MEDUSA: Medusa,
    EAGLE: HeadChain,
    EAGLE3: HeadChain,
    MTP: HeadChain,
}  # by method


def make_speculation(
    config: EngineConfig,
    kv_config: KVCacheConfig,
    batch: InputBatch,
    sampler: Sampler,
    proposer: ModelProposer | None = None,
    clocks: Clocks | None = None,
) -> Speculation | None:
    """Return the drafters of this engine: jump-ahead, then those of `--speculative-config`.

    `proposer` is of the configured method, if it is one of `MODEL_PROPOSERS`; `clocks` decide the number of drafts.

    Raises:
        StartupError: the heads have layers that cannot roll back.
    """
    settings, drafters = config.speculative.settings, dict[str, Drafter]()
    if settings.method is not None:
        _check_states(config, kv_config)
    forced = jump_ahead(config, kv_config, batch, sampler)
    if forced is not None:
        drafters["jump_ahead"] = forced
    drafters |= make_drafters(config)
    if proposer is not None:
        drafters[settings.method or ""] = proposer

    def num_allowed(request_id: str, known: NDArray[np.int32], drafts: list[int]) -> int:
        return sampler.num_allowed(batch.row(request_id), known, drafts)

    if not drafters:
        return None
    return Speculation(
        drafters,
        most=settings.most_drafts,
        adaptive=settings.adaptive and settings.method is not None,
        num_ahead=config.num_tokens_ahead,
        allowed=num_allowed,
        clocks=clocks,
    )


def _check_states(config: EngineConfig, kv_config: KVCacheConfig) -> None:
    """Refuse heads with state layers: they compute each token again with the target's state.

    Raises:
        StartupError: such layers exist.
    """
    specs = (spec for name, spec in kv_config.layer_specs.items() if name.startswith(DRAFT_PREFIX))
    if uses_draft_heads(config) and not all(spec.rolls_back for spec in specs):
        raise StartupError(
            "--speculative-config: these draft heads have layers that keep a state, which cannot roll back after "
            "rejected drafts"
        )
