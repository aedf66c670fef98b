# SPDX-License-Identifier: Apache-2.0
"""Drafter interface, and the table of drafters.

Invariant: a drafter does not change texts. A wrong draft costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from quire.config import EngineConfig
from quire.config.speculative import COMMON_KEYS, DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import ConfigError
from quire.plugins import FACTORY, PluginTable

if TYPE_CHECKING:  # keeps --help from importing numpy
    import numpy as np
    from numpy.typing import NDArray

Owner = tuple[str, str | None]
"""Tenant and cache salt; outputs of a request serve drafts only for the same owner."""


class Text(NamedTuple):
    """Tokens of a request that has just sampled."""

    request_id: str
    token_ids: NDArray[np.int32]
    """Prompt and output tokens; must not be changed or kept."""
    num_prompt_tokens: int
    owner: Owner


class Draft(NamedTuple):
    """Draft tokens, perhaps none."""

    token_ids: list[int]
    strength: int = 0
    """Small number; drafts of one drafter with equal strength are assumed to be accepted equally often."""


NO_DRAFT = Draft([])
CERTAIN = -1  # strength of drafts with hardly an alternative; they precede all others


class Drafter(Protocol):
    """Proposes the next tokens of requests.

    A drafter whose time grows with the number of tokens has an attribute `takes_time = True`; it is then called for no
    more tokens than pay.
    """

    keys: ClassVar[frozenset[str]]
    """Keys of `--speculative-config` that it reads besides the common ones."""

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        """Return a draft of up to `most` tokens for each text, which may have grown at its end since the last call."""

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished or been preempted; it may be unknown."""


def takes_time(drafter: Drafter) -> bool:
    """Return whether each further draft token takes time."""
    return bool(getattr(drafter, "takes_time", False))


_MODEL = frozenset({"model", "quantization"})
MODEL_KEYS: Mapping[str, frozenset[str]] = {
    DRAFT_MODEL: _MODEL,
    MEDUSA: _MODEL,
    EAGLE: _MODEL,
    EAGLE3: _MODEL,
    MTP: frozenset({"quantization"}),
}
"""Methods with a model or heads, which the worker makes, and the keys that they read."""

DRAFTERS: PluginTable[Callable[[EngineConfig], Drafter]] = PluginTable(
    "quire.drafters",
    "--speculative-config: method",
    {
        "ngram": "quire.spec_decode.ngram:NgramDrafter",
        "suffix": "quire.spec_decode.suffix:SuffixDrafter",
        "recorded": "quire.spec_decode.recorded:RecordedDrafter",
    },
    FACTORY,
    words=("auto", *MODEL_KEYS),
)
AUTO = ("ngram", "suffix")  # drafters that cost only microseconds of the host


def drafter_names(method: str | None) -> tuple[str, ...]:
    """Return the drafters of a method that need no model."""
    if method is None or method in MODEL_KEYS:
        return ()
    return AUTO if method == "auto" else (method,)


def check_speculation(config: EngineConfig) -> None:
    """Refuse an unknown method, keys that it does not read, and a pooling model.

    Raises:
        ConfigError: unknown method, unused key or pooling model.
    """
    given = config.speculative.speculative_config
    method = config.speculative.settings.method
    names = drafter_names(method)
    if method is not None and config.pooling is not None:
        raise ConfigError("--speculative-config: a pooling model generates no tokens to draft")
    known = COMMON_KEYS | MODEL_KEYS.get(method or "", frozenset())
    known = known.union(*(getattr(DRAFTERS.resolve(name), "keys", ()) for name in names))
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"--speculative-config: {unknown[0]} is not used by method {method!r}")


def make_drafters(config: EngineConfig) -> dict[str, Drafter]:
    """Return the configured drafters that need no model, by name.

    Raises:
        ConfigError: a drafter cannot be made.
    """
    names = drafter_names(config.speculative.settings.method)
    return {name: DRAFTERS.resolve(name)(config) for name in names}
