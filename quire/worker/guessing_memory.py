"""How many hidden states what guesses by them keeps, and how many bytes that takes.

Shapes: H hidden size, W size of what is read of the target for a token.
"""

from __future__ import annotations

from quire.config import EngineConfig
from quire.config.speculative import EAGLE, EAGLE3, MTP
from quire.layers.base import activation_dtype
from quire.worker.jump_ahead import MOST as MOST_JUMPED

MOST_KEPT = 32
"""States of a row that heads keep which go on in their own, if a step does not bring more."""
CHAINS = (EAGLE, EAGLE3, MTP)
"""Methods of such heads."""


def room_of_states(config: EngineConfig) -> int:
    """States that a row has room for: of those behind which something is sampled in a step and in those in flight."""
    settings, jump = config.speculative.settings, config.structured_outputs.settings.jump_ahead
    drafts = max(settings.most_drafts + config.num_tokens_ahead, MOST_JUMPED if jump is None else jump)
    return max(1 + drafts, MOST_KEPT if settings.method in CHAINS else 0)


def width_of_states(config: EngineConfig) -> int:
    """W."""
    draft = None if config.draft is None else config.draft.arch.draft
    assert draft is not None, "heads read states"
    return config.arch.hidden_size * max(len(draft.reads), 1)


def guesses_by_states(config: EngineConfig) -> bool:
    """Whether there are heads."""
    return config.draft is not None and config.draft.arch.draft is not None


def kept_bytes(config: EngineConfig) -> int:
    """Of all rows: what is kept for heads, and a state of theirs."""
    if not guesses_by_states(config):
        return 0
    each = room_of_states(config) * width_of_states(config) + config.arch.hidden_size
    return config.scheduler.max_num_seqs * each * activation_dtype(config).itemsize


def passing_bytes(config: EngineConfig) -> int:
    """For a token of a step: what lies about beside a pass of the heads, which is what the target gave of the token,
    what is read of that, and the state that it becomes.
    """
    if not guesses_by_states(config):
        return 0
    width, size = width_of_states(config), config.arch.hidden_size
    return (size + 2 * width + size) * activation_dtype(config).itemsize
