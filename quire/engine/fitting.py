"""Texts as token ids that are no longer than they may be, with the special tokens around them.

Invariant: what is cut off is text; special tokens stay, so a model finds its first and its last token where it looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.engine.special_tokens import Encoded, Template
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError

SIDES = ("left", "right")


class Fitter:
    """Tokenizes texts, or pairs of them, to at most so many tokens; one thread at a time.

    Args:
        side: "left" or "right", where texts lose tokens.
        add_special_tokens: those that the tokenizer puts around a text and between two.
    """

    def __init__(self, tokenizer: Tokenizer, *, side: str = "right", add_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._special = add_special_tokens
        self._first: tuple[str, list[int]] = ("", [])

    def text(self, text: str, most: int | None) -> Encoded:
        """Tokens of a text, at most `most`.

        Raises:
            ValidationError: they leave no room for text; the text is not valid Unicode.
        """
        if most is None:
            return Encoded(self._tokenizer.encode(text, add_special_tokens=self._special))
        template, ids = self._settled(self._tokenizer.text_template), self._encode(text)
        return template.around(cut(ids, room_in(template, most, 1), self._side))

    def before_text(self, text: str) -> list[int]:
        """Tokens of a text that others follow: without the special ones that stand behind a text."""
        template = self._settled(self._tokenizer.text_template)
        return [*template.prefix, *self._encode(text)]

    def pair(
        self,
        first: str,
        second: str,
        most: int | None,
        most_each: tuple[int | None, int | None] = (None, None),
    ) -> Encoded:
        """Tokens of two texts as one prompt, at most `most`; each is cut to its own of `most_each` before.

        Raises:
            ValidationError: as `text`.
        """
        template = self._settled(self._tokenizer.pair_template)
        if first != self._first[0]:  # many pairs have the same query
            self._first = first, self._encode(first)
        one, two = (
            ids if limit is None else cut(ids, limit, self._side)
            for ids, limit in zip((self._first[1], self._encode(second)), most_each, strict=True)
        )
        if most is not None:
            one, two = cut_pair(one, two, room_in(template, most, 2), self._side)
        return template.around(one, two)

    def shortened(self, text: str, most: int | None) -> str:
        """The text if it has no more than so many tokens, or what the rest of them say.

        Raises:
            ValidationError: as `text`.
        """
        ids = [] if most is None else self._encode(text)
        if most is None or len(ids) <= most:
            return text
        return self._tokenizer.decode(cut(ids, most, self._side), skip_special_tokens=False)

    def composed(
        self, first: str, second: str, most: int | None, compose: Callable[[str, str], list[int]]
    ) -> list[int]:
        """Tokens that are composed of two texts, at most `most`; it is the second that loses some, and one of it stays.

        What is left of a text may have more tokens than it was cut to, where half a character is another one.

        Raises:
            ValidationError: there is no room for it; as `text`.
        """
        composed = compose(first, second)
        if most is None or len(composed) <= most:
            return composed
        ids = self._encode(second)
        left = len(ids)
        while len(composed) > most:
            if left <= 1:
                raise ValidationError(
                    "there is no room for the second text beside the first and what the chat template writes",
                    param="truncate_prompt_tokens",
                )
            # At most half at a time: what is composed may have a text more than once.
            left = max(left - (len(composed) - most), left // 2)
            rest = self._tokenizer.decode(cut(ids, left, self._side), skip_special_tokens=False)
            composed = compose(first, rest)
        return composed

    def windows(self, text: str, most: int) -> list[list[int]]:
        """Tokens of a text in as few pieces of at most `most` as it has, each with the special tokens around it.

        Raises:
            ValidationError: as `text`.
        """
        template, ids = self._settled(self._tokenizer.text_template), self._encode(text)
        size = room_in(template, most, 1)
        starts = range(0, max(len(ids), 1), size)
        return [template.around(ids[start : start + size]).token_ids for start in starts]

    def _settled(self, template: Template) -> Template:
        return template if self._special else template.bare()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def room_in(template: Template, most: int, num_texts: int) -> int:
    """Tokens of text that fit beside the special ones.

    Raises:
        ValidationError: there is not one for each text.
    """
    room = most - template.size
    if room < num_texts:
        raise ValidationError(
            f"{most} tokens have no room for text beside the {template.size} special tokens",
            param="truncate_prompt_tokens",
        )
    return room


def cut(ids: Sequence[int], most: int, side: str) -> list[int]:
    """The first so many ids, or the last if it is the left side that is cut off."""
    excess = max(0, len(ids) - most)
    return list(ids[excess:] if side == "left" else ids[: len(ids) - excess])


def cut_pair(
    first: Sequence[int], second: Sequence[int], most: int, side: str
) -> tuple[list[int], list[int]]:
    """Both texts cut to so many ids in all: the longer one first, until they are equally long.

    Source: "longest first", as transformers' tokenizers cut pairs.
    """
    if len(first) + len(second) <= most:
        return list(first), list(second)
    shorter = min(len(first), len(second), most // 2)
    num_first = shorter if len(first) <= len(second) else most - shorter
    return cut(first, num_first, side), cut(second, most - num_first, side)
