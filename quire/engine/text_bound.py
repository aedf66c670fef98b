"""How few tokens a text can have, told by its length alone, so that a text that is much too long is never tokenized.

Invariant: sound for any text, and `None` for a tokenizer of which that is not certain. The rule: every character of a
text must end up in some token, and a token then stands for at most as many characters as its literal has. That holds

- if the model is a BPE that knows all 256 bytes, as letters (`ByteLevel`) or as `<0x00>` to `<0xFF>` (byte fallback):
  one that lacks some leaves characters out, or makes one token of many;
- if no step before it leaves anything out: `ByteLevel`, `Metaspace`, `Digits`, `Punctuation` and `Split` that keep
  what they split at, and as normalizers `Prepend`, `Replace` of a string by one that is no shorter, and Unicode's
  forms. NFC and NFKC make one character of at most four (the longest canonical decomposition), and so a token stands
  for up to four times as many;
- and if no added token takes the white space beside it along.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

MAX_COMPOSED = 4
"""Characters of which Unicode composes one at most."""
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Characters of a text that one token stands for at most; None if there is no telling."""
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
    """The settings of a normalizer or a pre-tokenizer, or of all that a sequence consists of."""
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
