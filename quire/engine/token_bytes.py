"""What a token adds to the text, as bytes.

Invariant: the bytes of a sequence of tokens, joined, are UTF-8 of what `tokenizers` decodes from the whole sequence
whenever the whole is valid UTF-8. A byte is given out by the token that brings it, valid or not, and no token changes
what an earlier one gave; so there is one rule for invalid bytes, that of any UTF-8 decoder with errors="replace".

Two things are taken for granted of a decoder, and hold for all families: a ByteLevel step is its first, and the steps
after ByteFallback leave the characters that byte tokens spell as they are, but for spaces at the start of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

ANCHOR = "a"
"""Stands for all text further to the left: a token that no decoder drops, merges or trims."""
MAX_TOKENS_WITHOUT_TEXT = 16
"""How many tokens at the very start are remembered while they have no text: what is trimmed may depend on them."""
WIDEST_UNFINISHED = 3
"""Bytes in the longest unfinished character of UTF-8."""
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
PER_TOKEN_STEPS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
"""Decoder steps that treat a token in the middle of a text alike whatever stands before it."""


class TokenBytes:
    """The table of a tokenizer: each token's bytes in the middle of a text, filled in as they are asked for.

    Threads may share one: an entry is a function of its id, so filling one twice does no harm.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token = backend.id_to_token
        self._join = backend.decoder.decode if backend.decoder else " ".join
        chain = _chain(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in chain]
        self._spells_bytes = kinds[:1] == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        self.ignores_neighbours = _ignores_neighbours(chain)
        self._inside: dict[int, bytes] = {}

    def inside(self, token_id: int) -> bytes:
        """Bytes of a token after other text; nothing for an id without a token."""
        added = self._inside.get(token_id)
        if added is None:
            token = self.token(token_id)
            added = b"" if token is None else self.raw(token) or self.difference([ANCHOR], token)
            self._inside[token_id] = added
        return added

    def raw(self, token: str) -> bytes | None:
        """The bytes that a token spells out, which need not be whole characters; None if it is plain text."""
        if self._spells_bytes:
            spelled = [BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in spelled else bytes(spelled)  # type: ignore[arg-type]
        found = BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes.fromhex(found[1]) if found else None

    def difference(self, before: Sequence[str], token: str) -> bytes:
        """UTF-8 of what the decoder's text grows by when `token` follows the tokens `before`."""
        text: str = self._join([*before, token])
        return text[len(self._join(before)) if before else 0 :].encode()


class TextPlace:
    """The end of a growing sequence of tokens: what a token adds there."""

    def __init__(self, table: TokenBytes, token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        """A place after `token_ids`, of which only the last that has a token matters; `skipped` ones add nothing."""
        self._table = table
        self._skipped = skipped
        self._before: list[str] = []
        self._has_begun = False
        last = next((token for i in reversed(token_ids) if (token := self._visible(i)) is not None), None)
        if last is not None:
            self._move(last, has_text=True)
        self.unfinished = self._last_bytes(token_ids)

    def skips(self, token_id: int) -> bool:
        """Return whether a token is one that adds nothing."""
        return token_id in self._skipped

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token would add here, special ones always counted in."""
        if self._has_begun and self._table.ignores_neighbours:
            return self._table.inside(token_id)
        token = self._table.token(token_id)
        if token is None:
            return b""
        raw = self._table.raw(token)
        if raw is not None and (self._has_begun or not _is_utf8(raw)):
            return raw
        return self._table.difference(self._before, token)

    def advance(self, token_id: int) -> bytes:
        """Step over a token and return the bytes that it adds."""
        if token_id in self._skipped:
            return b""
        added = self.bytes_of(token_id)
        if not (self._has_begun and self._table.ignores_neighbours):
            token = self._table.token(token_id)
            if token is not None:
                self._move(token, has_text=bool(added))
        return added

    def _move(self, token: str, *, has_text: bool) -> None:
        self._has_begun |= has_text or len(self._before) >= MAX_TOKENS_WITHOUT_TEXT
        self._before = [ANCHOR, token] if self._has_begun else [*self._before, token]

    def _visible(self, token_id: int) -> str | None:
        token: str | None = None if token_id in self._skipped else self._table.token(token_id)
        return token

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes before this place, as many as an unfinished character can have."""
        tail = b""
        for token_id in reversed(token_ids):
            token = self._visible(token_id)
            raw = b"" if token is None else self._table.raw(token)
            if raw is None:
                break
            tail = raw + tail
            if len(tail) >= WIDEST_UNFINISHED:
                break
        return tail[-WIDEST_UNFINISHED:]


def _chain(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, with sequences laid flat."""
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _chain(inner)]


def _ignores_neighbours(chain: Sequence[dict[str, Any]]) -> bool:
    is_fused = False
    for step in chain:
        kind = step["type"]
        if kind not in PER_TOKEN_STEPS or (is_fused and not _touches_only_the_start(step)):
            return False
        is_fused |= kind in ("Fuse", "ByteLevel")
    return True


def _touches_only_the_start(step: dict[str, Any]) -> bool:
    """What a step may do to the whole text without a token's bytes depending on its neighbours."""
    return step["type"] == "Fuse" or (step["type"] == "Strip" and not step["stop"])


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes of Latin-1 stand for themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
