# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to token ids and back, on the `tokenizers` library alone.

Invariant: never imports torch. Instances hold no per-call state, so threads may share one. Text of tokens is always
the UTF-8 of their bytes (`token_bytes`), decoded whole or step by step (`place_after`).

`max_chars_per_token` bounds the tokens of a text from its length, so that a text that is much too long is never
tokenized. Invariant: sound for any text, and `None` where that is uncertain. Every character must end up in some
token, and a token then covers at most as many characters as its literal has. That holds

- if the model is a BPE that has all 256 bytes, as letters (`ByteLevel`) or as `<0x00>` to `<0xFF>` (byte fallback):
  one that lacks some drops characters, or makes one token of many;
- if no step before it drops anything: `ByteLevel`, `Metaspace`, `Digits`, `Punctuation` and `Split` that keep
  their separators, and as normalizers `Prepend`, `Replace` of a string by one that is no shorter, and Unicode's
  forms. NFC and NFKC compose at most four characters (the longest canonical decomposition), and so a token covers
  up to four times as many;
- and if no added token strips adjacent white space.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import tokenizers

from quire.engine.added_tokens import read_settings
from quire.engine.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TOKENIZER_NAME,
    SpecialTokenTemplate,
    TextPlace,
    TokenBytes,
    converted_backend,
    named_by_ids,
    read_backend,
    read_chat_templates,
    read_template,
)
from quire.errors import ValidationError
from quire.features import PIECE_TOKENIZER
from quire.models.checkpoint_files import has_file
from quire.models.gguf.model import is_gguf
from quire.models.gguf.tokenizer import read_tokenizer
from quire.plugins import import_place
from quire.vllm_names.members import missing_member

MAX_COMPOSED = 4  # Most characters that Unicode composes into one.
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most characters that one token covers; None if uncertain."""
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    added = backend.get_added_tokens_decoder().values()
    if not all(map(_keeps_all, parts)) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocab = backend.get_vocab(with_added_tokens=True)
    if not _knows_all_bytes(backend, {part["type"] for part in parts}, vocab):
        return None
    composed = MAX_COMPOSED if any(part["type"] in ("NFC", "NFKC") for part in parts) else 1
    return composed * max(map(len, vocab))


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or a pre-tokenizer, or of all parts of a sequence."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    parts: list[dict[str, Any]] = settings.get("normalizers") or settings.get("pretokenizers") or [settings]
    return parts


def _keeps_all(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    if kind in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return kind in {"ByteLevel", "Metaspace", "Digits", "Prepend", "NFC", "NFD", "NFKC", "NFKD"}


def _knows_all_bytes(backend: tokenizers.Tokenizer, kinds: set[str], vocab: dict[str, int]) -> bool:
    if not isinstance(backend.model, tokenizers.models.BPE):
        return False
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) if "ByteLevel" in kinds else BYTE_TOKENS
    return ("ByteLevel" in kinds or backend.model.byte_fallback) and alphabet <= vocab.keys()


REPLACEMENT = "\ufffd"
P = ParamSpec("P")
T = TypeVar("T")
# Shorter texts are tokenized on the event loop (well under a millisecond), longer ones in a thread.
INLINE_CHARS = 4096
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 1) // 2)), thread_name_prefix="quire-tokenize")
"""Few threads of their own: many long texts at once occupy neither all cores nor the default thread pool."""


async def beside_loop(num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work proportional to `num_chars`, such as tokenizing, without blocking the event loop for long.

    Long texts queue in order of arrival, short ones run at once.
    """
    if num_chars <= INLINE_CHARS:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(
        _THREADS, functools.partial(work, *args, **kwargs)
    )


class Tokenizer:
    """Model's tokenizer with its special tokens and chat templates."""

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
        self.file = file  # Its tokenizer.json, if it has one.
        self.chat_templates = dict(chat_templates or {})  # By name; most models have only the default.
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
        file = directory / TOKENIZER_NAME
        pieces: Tokenizer | None = None if has_file(file) else import_place(PIECE_TOKENIZER)(directory)
        if pieces is not None:
            return pieces
        settings = read_settings(directory)
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
        """Model's default template."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        """Return a conversation as its prompt: token ids, or with `tokenize=False` text; a list of these for several.

        Names and defaults are those of transformers; other options are variables of the template.

        Raises:
            ValidationError: there is no template, or it refuses the conversation or an option.
        """
        if conversation and not isinstance(conversation[0], Mapping):
            one_by_one = functools.partial(
                self.apply_chat_template,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=tokenize,
                **options,
            )
            return list(map(one_by_one, conversation))
        # By name: templates belong to the entry points, which import this module.
        make = import_place("quire.entrypoints.chat.template:ChatTemplate.from_tokenizer")
        template = self.cached("chat_template", make) if chat_template is None else make(self, chat_template)
        chat = template.compose(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        return chat.encode(self) if tokenize else chat.text

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
        """Return token name -> id."""
        names: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return names

    def spells_as(self, other: Tokenizer) -> bool:
        """Return whether tokens of the same names have the same text in both."""
        mine, theirs = self._backend.decoder, other._backend.decoder
        states = [None if decoder is None else decoder.__getstate__() for decoder in (mine, theirs)]
        return states[0] == states[1]

    @property
    def num_ids(self) -> int:
        """Greatest id + 1."""
        return max(self.vocabulary().values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Return token ids of `text`; with `allow_special=False`, special tokens spelled out in it stay plain text.

        Raises:
            ValidationError: the text holds a lone surrogate, which no encoding has.
        """
        self.check_unicode(text)
        splits = self._splits_special or not allow_special
        backend = self._plain_backend if splits else self._backend
        # As a batch, because only then does the library let other threads run: `encode` stops them all until it is
        # done. The fast one makes no offsets, which take more memory than the text.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @staticmethod
    def check_unicode(text: str) -> None:
        """Raise ValidationError if the text holds a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"the text is not valid Unicode: lone surrogate at position {error.start}", param="prompt"
            ) from None

    def encode_target(self, text: str) -> list[int]:
        """Return the ids of a text with which a decoder behind an encoder begins, without special tokens around it."""
        return self.encode(text, add_special_tokens=False)

    @functools.cached_property
    def text_template(self) -> SpecialTokenTemplate:
        """Special tokens that `encode` puts around a text."""
        return read_template(self._backend, 1)

    @functools.cached_property
    def pair_template(self) -> SpecialTokenTemplate:
        """Special tokens around and between two texts that the model reads as one."""
        return read_template(self._backend, 2)

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, from its length alone; 0 if none is known."""
        return -(-len(text) // self._max_chars_per_token) if self._max_chars_per_token else 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True, shown: Sequence[int] = ()) -> str:
        """Return the text of `ids`; ids without a token are skipped.

        Bytes that are no valid UTF-8 become U+FFFD, one for each maximal subpart (Unicode 15, 3.9), and never consume
        a valid neighboring character.

        Args:
            shown: special tokens that are not skipped.
        """
        if skip_special_tokens and shown:
            hidden, skip_special_tokens = self.special_ids.difference(shown), False
            ids = [token_id for token_id in ids if token_id not in hidden]
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        if REPLACEMENT not in text:
            return text
        # The library gives up a whole run of byte tokens for one invalid byte.
        place = self.place_after([], skip_special_tokens=skip_special_tokens)
        return b"".join(map(place.advance, ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds in the middle of a text: with its leading space, perhaps partial characters."""
        return self._table.inside(token_id)

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for partial characters."""
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
        """Return the position after `ids`, from which the bytes of further tokens are available one by one.

        Args:
            shown: special tokens that are not skipped.
        """
        skipped = self._table.special_ids if skip_special_tokens else frozenset[int]()
        return TextPlace(self._table, ids, skipped.difference(shown) if shown else skipped)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which are left out of texts by default."""
        return self._table.special_ids

    def literal(self, token_id: int) -> str:
        """Return a token as written in the tokenizer's file; empty for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    @property
    def is_bytewise(self) -> bool:
        """True if a token adds the same bytes after any other text."""
        return self._table.ignores_neighbors

    @functools.cached_property
    def begins_bytewise(self) -> bool:
        """True if that holds at the start of a text, too."""
        start = TextPlace(self._table, [], frozenset())
        return all(start.bytes_of(i) == self._table.inside(i) for i in range(self.vocab_size))

    def has_text(self, ids: Sequence[int]) -> bool:
        """Return whether any of these tokens has text."""
        return any(i not in self.special_ids and self._table.inside(i) for i in ids)

    @functools.cached_property
    def _table(self) -> TokenBytes:
        return TokenBytes(self._backend)

    @functools.cached_property
    def _max_chars_per_token(self) -> int | None:
        return max_chars_per_token(self._backend)

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """Literals of all special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A second instance, because the switch is a property of the whole tokenizer and threads share it.
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
        """Refuse the call of transformers' tokenizers."""
        raise TypeError(
            "Tokenizer is not transformers' and cannot be called: encode(text) returns the token ids"
        )

    if not TYPE_CHECKING:
        __getattr__ = missing_member("Tokenizer")
