"""`Tokenizer`: text to token ids and back, on the `tokenizers` library alone.

Invariant: never imports torch. Instances hold no per-call state, so threads may share one. Text of tokens is always
the UTF-8 of their bytes (`token_bytes`), decoded whole or step by step (`place_after`).
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tokenizers

from quire.engine.added_tokens import read_settings
from quire.engine.special_tokens import Template, read_template
from quire.engine.text_bound import max_chars_per_token
from quire.engine.token_bytes import TextPlace, TokenBytes
from quire.engine.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TOKENIZER_NAME,
    converted_backend,
    named_by_ids,
    read_backend,
    read_chat_templates,
)
from quire.errors import ValidationError
from quire.models.checkpoint_files import has_file
from quire.models.gguf.model import is_gguf
from quire.models.gguf.tokenizer import read_tokenizer

REPLACEMENT = "\ufffd"
P = ParamSpec("P")
T = TypeVar("T")
INLINE_CHARS = 4096
"""Shorter texts are tokenized on the event loop (well under a millisecond), longer ones in a thread."""
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), thread_name_prefix="quire-tokenize")
"""Few, and of their own: many long texts at once take neither all cores nor the threads that others wait for."""


async def beside_loop(num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what tokenizes so many characters, or makes them of tokens, so that the event loop hardly waits.

    Long texts wait for each other, in the order in which they came, and short ones for none.
    """
    if num_chars <= INLINE_CHARS:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(
        _THREADS, functools.partial(work, *args, **kwargs)
    )


class Tokenizer:
    """A model's tokenizer with its special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str] | None = None,
        *,
        file: Path | None = None,
        truncation_side: str = "right",
        splits_special: bool = False,
    ) -> None:
        """`named_tokens` are literals by name (`eos_token`); `splits_special`: special tokens in texts are text."""
        self._backend = backend
        self.file = file
        """Its tokenizer.json, if it is from one."""
        self.chat_templates = dict(chat_templates or {})
        """By name; most models have but one, the default."""
        self.named_tokens = dict(named_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._derived: dict[str, Any] = {}
        self.truncation_side = truncation_side
        self._splits_special = splits_special

    @staticmethod
    def from_dir(directory: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint directory, or of a model in GGUF.

        Raises:
            ModelLoadError: there is no tokenizer, or its files cannot be read.
        """
        if is_gguf(directory):
            found = read_tokenizer(directory)
            return Tokenizer(found.backend, found.named_tokens, found.chat_templates)
        settings, file = read_settings(directory), directory / TOKENIZER_NAME
        templates = read_chat_templates(directory, settings.file)
        if has_file(file):
            backend, named = read_backend(directory, settings), settings.literals
        else:
            backend, named = converted_backend(directory)
        return Tokenizer(
            backend,
            named_by_ids(directory, backend) | named,
            templates,
            file=file if has_file(file) else None,
            truncation_side=settings.file.choice("truncation_side", ("right", "left"), "right"),
            splits_special=settings.file.flag("split_special_tokens", False),
        )

    @property
    def chat_template(self) -> str | None:
        """The model's default template."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.token_to_id(self.eos_token) if self.eos_token else None

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.token_to_id(self.bos_token) if self.bos_token else None

    def vocabulary(self) -> dict[str, int]:
        """Each token by its name, and its id."""
        names: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return names

    def spells_as(self, other: Tokenizer) -> bool:
        """Whether tokens of the same names are the same text in both."""
        mine, theirs = self._backend.decoder, other._backend.decoder
        states = [None if decoder is None else decoder.__getstate__() for decoder in (mine, theirs)]
        return states[0] == states[1]

    @property
    def num_ids(self) -> int:
        """One more than the greatest id."""
        return max(self.vocabulary().values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of `text`; with `allow_special=False`, special tokens spelled out in it stay plain text.

        Raises:
            ValidationError: the text holds a lone surrogate, which no encoding has.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"the text is not valid Unicode: lone surrogate at position {error.start}", param="prompt"
            ) from None
        splits = self._splits_special or not allow_special
        backend = self._plain_backend if splits else self._backend
        # As a batch, because only then does the library let other threads run: `encode` stops them all until it is
        # done. The fast one makes no offsets, which take more memory than the text.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @functools.cached_property
    def text_template(self) -> Template:
        """The special tokens that `encode` puts around a text."""
        return read_template(self._backend, 1)

    @functools.cached_property
    def pair_template(self) -> Template:
        """Those that belong around and between two texts which the model reads as one."""
        return read_template(self._backend, 2)

    def min_num_tokens(self, text: str) -> int:
        """Tokens that `text` has at least, by its length alone; 0 where a tokenizer may leave some of it out."""
        return -(-len(text) // self._max_chars_per_token) if self._max_chars_per_token else 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token become nothing.

        Bytes that are no valid UTF-8 become U+FFFD, one for each maximal subpart (Unicode 15, 3.9), and never take
        a valid character beside them along.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT not in text:
            return text
        # The library gives up a whole run of byte tokens for one invalid byte.
        place = self.place_after([], skip_special_tokens=skip_special_tokens)
        return b"".join(map(place.advance, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds in the middle of a text: with its leading space, and perhaps parts of characters."""
        return self._table.inside(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for partial characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def texts_of_all(self) -> list[str]:
        """Return the text of each token by itself, special ones included; an id without a token has none."""
        ids = [[token_id] for token_id in range(self.num_ids)]
        texts: list[str] = self._backend.decode_batch(ids, skip_special_tokens=False)
        return texts

    def cached(self, name: str, make: Callable[[Tokenizer], T]) -> T:
        """Return what `make` derives from this tokenizer, made once for each name."""
        if name not in self._derived:
            self._derived[name] = make(self)
        found: T = self._derived[name]
        return found

    def place_after(
        self, ids: Sequence[int], *, skip_special_tokens: bool, shown: Sequence[int] = ()
    ) -> TextPlace:
        """The end of `ids`, from where the bytes of further tokens can be had one by one.

        Args:
            shown: special tokens that are not skipped.
        """
        skipped = self._table.special_ids if skip_special_tokens else frozenset[int]()
        return TextPlace(self._table, ids, skipped.difference(shown) if shown else skipped)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which are in no text unless it is asked for them."""
        return self._table.special_ids

    def literal(self, token_id: int) -> str:
        """How a token is written in the tokenizer's file; nothing for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def is_bytewise(self) -> bool:
        """Whether a token adds the same bytes wherever it stands behind other text."""
        return self._table.ignores_neighbours

    @functools.cached_property
    def begins_bytewise(self) -> bool:
        """Whether that holds at the start of a text, too."""
        start = TextPlace(self._table, [], frozenset())
        return all(start.bytes_of(i) == self._table.inside(i) for i in range(self.vocab_size))

    def has_text(self, ids: Sequence[int]) -> bool:
        """Whether any of these tokens is text."""
        return any(i not in self.special_ids and self._table.inside(i) for i in ids)

    @functools.cached_property
    def _table(self) -> TokenBytes:
        return TokenBytes(self._backend)

    @functools.cached_property
    def _max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._backend)

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """The literals of all special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A second instance, because the switch is a property of the whole tokenizer and threads share it.
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain
