"""DRY sequence breakers as token ids.

A breaker may begin in the middle of a token and end in the middle of another, so each text has several forms: the
tokens that contain it whole, and for each of its beginnings the tokens that end in it, followed by those of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.lexicons import Lexicon
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.sampling_extras import DRY_SEQUENCE_BREAKERS, DryBreaker
from quire.sampling_params import SamplingParams

MAX_TAIL_TOKENS = 20
MAX_HEADS = 2**17  # token ids of all forms of one request's breakers
MAX_CACHED_TEXTS = 256


def dry_breakers(params: SamplingParams, lexicon: Lexicon) -> tuple[DryBreaker, ...]:
    """Return all forms of a request's sequence breakers; without a tokenizer the default ones have none.

    Raises:
        ValidationError: breakers are named and there is no tokenizer, or they have too many forms.
    """
    named = params.dry_sequence_breakers
    if lexicon.tokenizer is None:
        if named:
            raise ValidationError(
                "dry_sequence_breakers need a tokenizer; send [] for none", param="dry_sequence_breakers"
            )
        return ()
    texts = DRY_SEQUENCE_BREAKERS if named is None else named
    table = lexicon.tokenizer.cached("dry_breakers", BreakerForms)
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
    """Forms of texts in the tokens of one tokenizer. Threads may share one: entries are functions of their texts."""

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
        """Return the forms of one breaker."""
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
