"""The interface to the libraries that turn grammars into masks of tokens.

Invariant: a failure of the library, panics included, comes out as `GrammarError`, and concerns one grammar or matcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary

EVERYTHING = -1
"""A word that allows all of its tokens."""
DEAD_END = "nothing that the model can write goes on from here"
"""The message of a `GrammarError` of a mask that would be empty."""


class Masks:
    """The masks of some samples.

    Attributes:
        words: [U, ceil(V / 32)] int32: bit i % 32 of word i // 32 says whether token i may come next; at first all may.
    """

    def __init__(self, num_masks: int, vocab_size: int) -> None:
        self.words: NDArray[np.int32] = np.full((num_masks, -(-vocab_size // 32)), EVERYTHING, dtype=np.int32)
        self.num_bytes: int = self.words.shape[1] * self.words.itemsize
        self._address: int = int(self.words.ctypes.data)

    def address(self, place: int) -> int:
        """Where a mask begins, for libraries that write to memory: asking numpy takes longer than most masks do."""
        return self._address + place * self.num_bytes

    def set_only(self, place: int, token_ids: Iterable[int]) -> None:
        """Allow these tokens, and no other."""
        bits = np.zeros(self.words.shape[1] * 32, dtype=np.uint8)
        bits[[*token_ids]] = 1
        self.words[place] = np.packbits(bits, bitorder="little").view(np.int32)

    def forbid(self, place: int, token_ids: Iterable[int]) -> bool:
        """Take tokens out; returns whether any is left."""
        words = self.words[place]
        for token_id in token_ids:
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32).view(np.int32)
        return bool(words.any())

    def allows(self, place: int, token_id: int) -> bool:
        return bool(self.words[place, token_id // 32] >> token_id % 32 & 1)


class GrammarError(Exception):
    """A constraint cannot be compiled, or a text cannot go on; the message is for the client.

    `exhausted` says that it is a matter of the limits on a shared state, so that a matcher of its own may go on.
    """

    def __init__(self, message: str, *, exhausted: bool = False) -> None:
        super().__init__(message)
        self.exhausted = exhausted


class Matcher(ABC):
    """One text that grows under a grammar. Not to be used by two threads at once."""

    @abstractmethod
    def fill(self, masks: Masks, place: int) -> None:
        """Write which tokens may come next; ends are among them exactly if the text may end here.

        Raises:
            GrammarError: no token may come, or the grammar takes more than a step may take.
        """

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Step over a token that is no end; False, and nothing done, if the grammar does not allow it.

        Raises:
            GrammarError: a limit is met. The matcher is of no use any more.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing may follow it."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text is whole."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """The only tokens that may come next, as far as there is no choice; perhaps fewer."""


class Grammar(ABC):
    """A compiled constraint."""

    @abstractmethod
    def new_matcher(self, *, shared: bool = True) -> Matcher:
        """A matcher at the start of a text.

        Args:
            shared: what one matcher finds out saves others work; otherwise this one answers for itself alone.
        """


class GrammarBackend(ABC):
    """A library, for the tokens of one model.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def prepare(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Do once what need not be done in every process; raises GrammarError as `compile` does."""
        return params

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a settled constraint; other threads run meanwhile.

        Raises:
            GrammarError: it cannot be compiled; says why.
        """

    @abstractmethod
    def matches_beyond(self, pattern: str, bound: str) -> bool:
        """Whether an expression matches a text that another one does not; both are good expressions.

        Raises:
            GrammarError: the library cannot tell.
        """
