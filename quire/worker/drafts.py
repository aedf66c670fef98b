"""Drafts: guesses of a request's next tokens, which a step verifies all at once.

Invariant: what a request gets is what it would have got without drafts. Behind each draft the step samples what it
would sample if all tokens before were the request's, and that counts only where they are. So verifying is comparing,
and whether a request is greedy or random, and what shapes its choice, is nobody's business here.

After Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), with the sampled token
itself in the place of a test that only keeps its distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.config.speculative import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import StartupError
from quire.kv_cache.spec import KVCacheConfig
from quire.spec_decode.clocks import Clocks
from quire.spec_decode.drafter import Drafter, make_drafters
from quire.spec_decode.speculation import Speculation
from quire.worker.guessing_memory import guesses_by_states
from quire.worker.guessing_model import GuessingModel
from quire.worker.head_chain import HeadChain
from quire.worker.input_batch import InputBatch
from quire.worker.jump_ahead import jump_ahead
from quire.worker.medusa import Medusa
from quire.worker.recurrent_draft import make_draft_model
from quire.worker.sampler.grammar import GrammarMask

DRAFT_PREFIX = "draft."
"""Of the names of layers of a model that guesses."""
GUESSING_MODELS: Mapping[str, Callable[..., GuessingModel]] = {
    DRAFT_MODEL: make_draft_model,
    MEDUSA: Medusa,
    EAGLE: HeadChain,
    EAGLE3: HeadChain,
    MTP: HeadChain,
}
"""By method, what guesses by a model or by heads."""


def make_speculation(
    config: EngineConfig,
    kv_config: KVCacheConfig,
    batch: InputBatch,
    grammars: GrammarMask,
    guessing: GuessingModel | None = None,
    clocks: Clocks | None = None,
) -> Speculation | None:
    """Who guesses for this engine: what `--speculative-config` names, behind what grammars leave no choice about.

    `guessing` is of the method that the configuration names, if that is one of `GUESSING_MODELS`; `clocks` decide how
    much is guessed.

    Raises:
        StartupError: somebody is to guess, and there are layers that cannot take guesses back.
    """
    settings, drafters = config.speculative.settings, dict[str, Drafter]()
    if settings.method is not None:
        _check_states(config, kv_config)
    forced = jump_ahead(config, kv_config, batch, grammars)
    if forced is not None:
        drafters["jump_ahead"] = forced
    drafters |= make_drafters(config)
    if guessing is not None:
        drafters[settings.method or ""] = guessing

    def num_allowed(request_id: str, known: NDArray[np.int32], drafts: list[int]) -> int:
        return grammars.num_allowed(batch.row(request_id), known, drafts)

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
    """Refuse layers with states in heads, which meet each token with a state of the target's, and again.

    Raises:
        StartupError: says which.
    """
    guessing = (spec for name, spec in kv_config.layer_specs.items() if name.startswith(DRAFT_PREFIX))
    if guesses_by_states(config) and not all(spec.rolls_back for spec in guessing):
        raise StartupError(
            "--speculative-config: layers of these heads keep a state, which does not go back behind what they guess "
            "themselves"
        )


def count_kept(sampled: Sequence[int], drafts: Sequence[int], is_bad: Sequence[bool]) -> int:
    """How many tokens of a request count: those that its first drafts agree with, and the one behind them.

    Where nothing could be sampled, the tokens before count, and the next step finds out again.

    Args:
        sampled: [1 + k] tokens, the first of which stands where the first draft does.
        drafts: [k].
        is_bad: [1 + k] whether there is no such token; the first is there.
    """
    for place, draft in enumerate(drafts):
        if sampled[place] != draft or is_bad[place + 1]:
            return place + 1
    return len(sampled)
