# SPDX-License-Identifier: Apache-2.0
"""Tokenizer contexts of the model and of adapters, and request fields converted from text to token ids.

Invariant: an adapter's files are read once, not per request; as many contexts are cached as adapters are kept in host
memory. A running request keeps its own.

Token bytes for grammars are those of `token_bytes`, which also make the text, so a grammar constrains the actual
output.

DRY sequence breakers may begin in the middle of a token and end in the middle of another. So each text has several
forms: the tokens that contain it whole, and for each prefix the tokens that end in it, followed by the remaining ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.adapters import AdapterRequest
from quire.config import EngineConfig
from quire.engine.file_states import check_files
from quire.engine.startup import load_tokenizer
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError, ValidationError
from quire.features import ADAPTER_TOKENIZER
from quire.plugins import import_place
from quire.sampling_extras import DRY_SEQUENCE_BREAKERS, DryBreaker, checked_bad_words_token_ids
from quire.sampling_params import SamplingParams, ThinkingMarkers
from quire.vocabulary import Vocabulary

THINK = ("<think>", "</think>")


def bad_words_token_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return a request's forbidden token sequences: its own, and each word with and without a leading space.

    Raises:
        ValidationError: there is no tokenizer, a word has no token, or they make too many sequences.
    """
    if tokenizer is None:
        raise ValidationError("bad_words need a tokenizer; use bad_words_token_ids", param="bad_words")
    sequences = list(params.bad_words_token_ids)
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ValidationError(f"bad_words: {word!r:.100} has no token", param="bad_words")
            sequences.append(ids)
    return checked_bad_words_token_ids(sequences)


def find_thinking_markers(
    config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int
) -> ThinkingMarkers | None:
    """Return the tokens that open and close reasoning, from the options or <think> tags; None: unknown.

    Raises:
        ConfigError: an option is given without the other, or makes too many tokens.
    """
    start, end = config.model.reasoning_start_str, config.model.reasoning_end_str
    if tokenizer is None or bool(start) != bool(end):
        if start or end:
            raise ConfigError(
                "--reasoning-start-str and --reasoning-end-str need each other, and a tokenizer"
            )
        return None
    texts = (start, end) if start else THINK
    start_ids, end_ids = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    if not start and (len(start_ids), len(end_ids)) != (1, 1):
        return None
    if max((*start_ids, *end_ids), default=0) >= vocab_size:
        return None
    try:
        return ThinkingMarkers(start_ids, end_ids)
    except ValidationError as error:
        raise ConfigError(f"--reasoning-start-str and --reasoning-end-str: {error.message}") from None


def indexed_ids(params: SamplingParams) -> dict[str, Iterable[int]]:
    """Return field -> token ids by which logits will be indexed."""
    markers = params.thinking_markers
    return {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "bad_words_token_ids": [token_id for word in params.bad_words_token_ids for token_id in word],
        "thinking_markers": () if markers is None else (*markers.start_ids, *markers.end_ids),
    }


def load_vocabulary(config: EngineConfig) -> Vocabulary:
    """Return the vocabulary of a model whose tokenizer supports grammars.

    Raises:
        ModelLoadError: the tokenizer cannot be read, or its files have changed since the start.
    """
    tokenizer = load_tokenizer(config)
    check_files(config)
    assert tokenizer is not None, "constraints are refused without a tokenizer"
    vocab_size = config.arch.vocab_size
    return vocabulary_of(tokenizer, vocab_size, end_ids(config, tokenizer, vocab_size))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> Vocabulary:
    """Return a vocabulary of `vocab_size` tokens, as many as logits; special tokens have no text."""
    hidden = set(tokenizer.special_ids) | set(ends)
    tokens = [b"" if i in hidden else tokenizer.token_bytes(i) for i in range(vocab_size)]
    special = {tokenizer.literal(i): i for i in tokenizer.special_ids if i < vocab_size}
    return Vocabulary(tokens, special, tuple(ends))


def end_ids(config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the ids that end a text: those of the model's files, and the tokenizer's if it is below `vocab_size`."""
    ids = list(config.arch.eos_token_ids)
    own = tokenizer.eos_token_id if tokenizer else None
    if own is not None and own not in ids and own < vocab_size:
        ids.append(own)
    return ids


@dataclass(frozen=True, eq=False)
class TokenizerContext:
    """Tokenizer with derived request settings."""

    tokenizer: Tokenizer | None
    end_ids: list[int]  # Tokens that end a text.
    thinking_markers: ThinkingMarkers | None
    vocab_size: int  # Token ids that requests may use.

    @staticmethod
    def create(config: EngineConfig, tokenizer: Tokenizer | None, vocab_size: int) -> TokenizerContext:
        """Build a context; raises ConfigError if the reasoning options do not fit the tokenizer."""
        markers = find_thinking_markers(config, tokenizer, vocab_size)
        return TokenizerContext(tokenizer, end_ids(config, tokenizer, vocab_size), markers, vocab_size)


class TokenizerCache:
    """Thread-safe cache of the tokenizer contexts of the model and its adapters.

    Raises:
        ConfigError: as `TokenizerContext.create`.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.model = TokenizerContext.create(config, tokenizer, config.arch.vocab_size)
        self._config = config
        self._lock = threading.Lock()
        self._of_adapters: OrderedDict[str, TokenizerContext] = OrderedDict()  # least recently used first

    def known(self, adapter: AdapterRequest | None) -> TokenizerContext | None:
        """Return the cached context of an adapter, or of the model; None: its files have to be read."""
        if adapter is None or self.model.tokenizer is None or not self._config.serves_adapters:
            return self.model
        with self._lock:
            found = self._of_adapters.get(adapter.key)
            if found is not None:
                self._of_adapters.move_to_end(adapter.key)
            return found

    def of(self, adapter: AdapterRequest | None) -> TokenizerContext:
        """Return the context of an adapter, or of the model; may read files.

        Raises:
            ValidationError: the adapter's tokenizer does not fit the model's; names the file.
        """
        found = self.known(adapter)
        if found is None:
            assert adapter is not None
            found = import_place(ADAPTER_TOKENIZER)(self._config, self.model, adapter)
            assert isinstance(found, TokenizerContext)
            self._keep(adapter.key, found)
        return found

    def _keep(self, key: str, tokenizer_context: TokenizerContext) -> None:
        with self._lock:
            self._of_adapters[key] = tokenizer_context
            while len(self._of_adapters) > self._config.num_kept_adapters:
                self._of_adapters.popitem(last=False)


MAX_TAIL_TOKENS = 20
MAX_HEADS = 2**17  # token ids of all forms of one request's breakers
MAX_CACHED_TEXTS = 256


def dry_breakers(params: SamplingParams, tokenizer_context: TokenizerContext) -> tuple[DryBreaker, ...]:
    """Return all forms of a request's sequence breakers; without a tokenizer the default ones have none.

    Raises:
        ValidationError: breakers are named and there is no tokenizer, or they have too many forms.
    """
    named = params.dry_sequence_breakers
    if tokenizer_context.tokenizer is None:
        if named:
            raise ValidationError(
                "dry_sequence_breakers need a tokenizer; send [] for none", param="dry_sequence_breakers"
            )
        return ()
    texts = DRY_SEQUENCE_BREAKERS if named is None else named
    table = tokenizer_context.tokenizer.cached("dry_breakers", BreakerForms)
    found = tuple(form for text in texts for form in table.forms(text))
    num_heads = sum(len(form.heads) for form in found)
    if num_heads > MAX_HEADS:
        raise ValidationError(
            f"dry_sequence_breakers stand in {num_heads} tokens, the limit is {MAX_HEADS}: use fewer or longer ones",
            param="dry_sequence_breakers",
        )
    return found


@dataclass(frozen=True)
class _Ends:
    """Tokens whose texts end in the same character."""

    ids: list[int]
    texts: list[str]


class BreakerForms:
    """Forms of texts in the tokens of one tokenizer; thread-safe, since entries are functions of their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.texts_of_all()
        self._by_last: dict[str, _Ends] = {}
        for token_id, text in enumerate(self._texts):
            if text:
                ends = self._by_last.setdefault(text[-1], _Ends([], []))
                ends.ids.append(token_id)
                ends.texts.append(text)
        self._known: dict[str, list[DryBreaker]] = {}

    def forms(self, breaker: str) -> Sequence[DryBreaker]:
        known = self._known.get(breaker)
        if known is None:
            known = self._found(breaker)
            if len(self._known) >= MAX_CACHED_TEXTS:
                self._known.clear()
            self._known[breaker] = known
        return known

    def _found(self, breaker: str) -> list[DryBreaker]:
        whole = tuple(i for i, text in enumerate(self._texts) if breaker in text)
        forms = [DryBreaker(whole)] if whole else []
        is_whole = set(whole)
        for size in range(1, len(breaker)):
            ends = self._by_last.get(breaker[size - 1], _Ends([], []))
            begun = breaker[:size]
            heads = tuple(
                token_id
                for token_id, text in zip(ends.ids, ends.texts, strict=True)
                if text.endswith(begun) and token_id not in is_whole
            )
            if heads:
                rest = self._tokenizer.encode(breaker[size:], add_special_tokens=False)
                forms.append(DryBreaker(heads, tuple(rest[:MAX_TAIL_TOKENS])))
        return forms
