"""What guesses: the one shape of drafters, and the table of them.

Invariant: a drafter sees texts and changes none. What it says costs time if it is wrong, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from quire.config import EngineConfig
from quire.config.speculative import COMMON_KEYS, DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import ConfigError
from quire.plugins import FACTORY, PluginTable

if TYPE_CHECKING:  # a command that prints its help should not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

Owner = tuple[str, str | None]
"""Tenant and cache salt: what one request has generated may serve others of the same owner only."""


class Text(NamedTuple):
    """A request that has just sampled."""

    request_id: str
    token_ids: NDArray[np.int32]
    """All its tokens, of prompt and output; not to be changed, and not to be kept."""
    num_prompt_tokens: int
    owner: Owner


class Draft(NamedTuple):
    """Guessed tokens, which may be none."""

    token_ids: list[int]
    strength: int = 0
    """A small number. Guesses of one drafter that have the same one are taken to be right equally often."""


NO_DRAFT = Draft([])
CERTAIN = -1
"""The strength of guesses to which there is hardly an alternative; they go before all others."""


class Drafter(Protocol):
    """Guesses what follows.

    One whose time grows with the tokens that it is asked for says so by an attribute `takes_time`, which is true, and
    is asked for no more than pays.
    """

    keys: ClassVar[frozenset[str]]
    """Of `--speculative-config`, what it understands beside what all do."""

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        """A draft of up to `most` tokens for each text. A text has grown at its end since it was last seen."""

    def forget(self, request_id: str) -> None:
        """The request has ended or been preempted; it may never have been seen."""


def takes_time(drafter: Drafter) -> bool:
    """Whether each token that it guesses takes time."""
    return bool(getattr(drafter, "takes_time", False))


_MODEL = frozenset({"model", "quantization"})
MODEL_KEYS: Mapping[str, frozenset[str]] = {
    DRAFT_MODEL: _MODEL,
    MEDUSA: _MODEL,
    EAGLE: _MODEL,
    EAGLE3: _MODEL,
    MTP: frozenset({"quantization"}),
}
"""Methods by which a model or heads guess, which the worker makes, and the keys that they understand."""

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
AUTO = ("ngram", "suffix")
"""What costs nothing but microseconds of the host."""


def drafter_names(method: str | None) -> tuple[str, ...]:
    """Who guesses by a method, of those that need no worker."""
    if method is None or method in MODEL_KEYS:
        return ()
    return AUTO if method == "auto" else (method,)


def check_speculation(config: EngineConfig) -> None:
    """Refuse a method that there is not, keys that it would ignore, and a model with nothing to guess.

    Raises:
        ConfigError: names what is wrong.
    """
    given = config.speculative.speculative_config
    method = config.speculative.settings.method
    names = drafter_names(method)
    if method is not None and config.pooling is not None:
        raise ConfigError("--speculative-config: a model that is pooled says nothing that could be guessed")
    known = COMMON_KEYS | MODEL_KEYS.get(method or "", frozenset())
    known = known.union(*(getattr(DRAFTERS.resolve(name), "keys", ()) for name in names))
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ConfigError(f"--speculative-config: {unknown[0]} means nothing to method {method!r}")


def make_drafters(config: EngineConfig) -> dict[str, Drafter]:
    """Those that the configuration names, by name.

    Raises:
        ConfigError: one cannot be made.
    """
    names = drafter_names(config.speculative.settings.method)
    return {name: DRAFTERS.resolve(name)(config) for name in names}
