# SPDX-License-Identifier: Apache-2.0
"""Interface to the libraries that turn grammars into token masks.

Invariant: a failure of the library, panics included, becomes a `GrammarError` and concerns one grammar or matcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.structured_outputs_params import StructuredOutputsParams
from quire.vocabulary import Vocabulary

EVERYTHING = -1  # mask word that allows all of its tokens
DEAD_END = "the grammar allows no further token"  # message of a `GrammarError` for an empty mask


class Masks:
    """Token masks of some samples.

    Attributes:
        words: [U, ceil(V / 32)] int32: bit i % 32 of word i // 32 is set if token i is allowed; initially all are.
    """

    def __init__(self, num_masks: int, vocab_size: int) -> None:
        self.words: NDArray[np.int32] = np.full((num_masks, -(-vocab_size // 32)), EVERYTHING, dtype=np.int32)
        self.num_bytes: int = self.words.shape[1] * self.words.itemsize
        self._address: int = int(self.words.ctypes.data)

    def address(self, place: int) -> int:
        """Return the memory address of a mask; asking numpy would take longer than most masks."""
        return self._address + place * self.num_bytes

    def set_only(self, place: int, token_ids: Iterable[int]) -> None:
        """Allow only these tokens."""
        bits = np.zeros(self.words.shape[1] * 32, dtype=np.uint8)
        bits[[*token_ids]] = 1
        self.words[place] = np.packbits(bits, bitorder="little").view(np.int32)

    def forbid(self, place: int, token_ids: Iterable[int]) -> bool:
        """Forbid tokens; return whether any is left."""
        words = self.words[place]
        for token_id in token_ids:
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32).view(np.int32)
        return bool(words.any())

    def allows(self, place: int, token_id: int) -> bool:
        return bool(self.words[place, token_id // 32] >> token_id % 32 & 1)


class GrammarError(Exception):
    """A constraint cannot be compiled, or a text cannot continue; the message is for the client.

    `exhausted`: a limit on shared states was hit, so a matcher with its own states may continue.
    """

    def __init__(self, message: str, *, exhausted: bool = False) -> None:
        super().__init__(message)
        self.exhausted = exhausted


class Matcher(ABC):
    """Text that grows under a grammar. Not thread-safe."""

    @abstractmethod
    def fill(self, masks: Masks, place: int) -> None:
        """Write the mask of allowed tokens; end tokens are allowed exactly if the text may end.

        Raises:
            GrammarError: no token is allowed, or the step exceeds a limit.
        """

    @abstractmethod
    def advance(self, token_id: int) -> bool:
        """Advance over a token that is no end token; return False, unchanged, if the grammar forbids it.

        Raises:
            GrammarError: a limit is exceeded; the matcher is unusable afterwards.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """True if the text is complete and nothing may follow."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """True if the text is complete."""

    @abstractmethod
    def forced_tokens(self) -> list[int]:
        """Return the tokens that the grammar forces next; perhaps not all of them."""


class Grammar(ABC):
    """Compiled constraint."""

    @abstractmethod
    def new_matcher(self, *, shared: bool = True) -> Matcher:
        """Return a matcher at the start of a text.

        Args:
            shared: share states with other matchers, which saves work; else use own states.
        """


class GrammarBackend(ABC):
    """Grammar library for the tokens of one model.

    Args:
        vocabulary: vocabulary of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def prepare(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Do work that is needed once, not in every process; raises GrammarError as `compile` does."""
        return params

    @abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a normalized constraint, without blocking other threads.

        Raises:
            GrammarError: it cannot be compiled.
        """

    @abstractmethod
    def matches_beyond(self, pattern: str, bound: str) -> bool:
        """Return whether an expression matches a text that `bound` does not; both are valid.

        Raises:
            GrammarError: the library cannot decide.
        """
