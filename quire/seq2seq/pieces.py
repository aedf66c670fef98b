# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models (Kudo and Richardson, 2018, arXiv:1808.06226): text to pieces, without that library.

A file is a protobuf with pieces, their scores and kinds, the kind of model, and the rules by which characters are
normalized, as a compiled trie (a double array) over UTF-8.
Invariant: normalization equals the library's. Of segmentations with equal sums of scores, a text may get another one,
since the library adds in float32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import models

from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file

SPACE = "\u2581"
MAX_BYTES = 64 * 2**20
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _SUFFIX = 3, 24
_CHARSMAP, _DUMMY_PREFIX, _REMOVES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5
_VARINT, _EIGHT_BYTES, _DELIMITED, _FOUR_BYTES = 0, 1, 2, 5
_NO_PIECE = "\U0010ffffunknown"
"""Name of what stands for unknown characters; no text has it, since the first character is unassigned."""


@dataclass(frozen=True)
class VocabularyPiece:
    """Piece of a vocabulary with its score, the greater the likelier, and its kind."""

    text: str
    score: float
    kind: int


class PieceModel:
    """Segmentation of texts by one file.

    Raises:
        ModelLoadError: the file is malformed, or has pieces that are not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._read(path)
        except (struct.error, IndexError, UnicodeDecodeError, TypeError, OverflowError) as error:
            raise ModelLoadError(f"{path}: is no SentencePiece model: {error}") from error

    def _read(self, path: Path) -> None:
        if not has_file(path) or path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: must be a file of at most {MAX_BYTES} bytes")
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        pieces: list[VocabularyPiece] = []
        for number, value in _fields(path.read_bytes()):
            if number == _PIECES:
                pieces.append(_piece(_message(value)))
            elif number in (_TRAINER, _NORMALIZER):
                (trainer if number == _TRAINER else normalizer).update(_message(value))
        self.pieces = [piece for piece in pieces if piece.kind == NORMAL]
        kind = trainer.get(_MODEL_TYPE, UNIGRAM)
        if not self.pieces or kind not in (UNIGRAM, BPE):
            raise ModelLoadError(f"{path}: must be a SentencePiece model of kind unigram or BPE, with pieces")
        others = {piece.kind for piece in pieces} - {NORMAL, UNKNOWN, CONTROL, UNUSED}
        if others or trainer.get(_SUFFIX):
            raise ModelLoadError(
                f"{path}: has pieces of bytes, pieces of users, or spaces behind words, which are not supported; save "
                "a tokenizer.json"
            )
        self.normalizer = Normalizer(normalizer)
        self._backend = tokenizers.Tokenizer(self._unigram() if kind == UNIGRAM else self._pairs())

    def _unigram(self) -> models.Unigram:
        scored = [(piece.text, piece.score) for piece in self.pieces]
        # The score of unknown characters is below the least one of a piece, so that of this entry must not be less.
        return models.Unigram([*scored, (_NO_PIECE, max(score for _, score in scored))], unk_id=len(scored))

    def _pairs(self) -> models.BPE:
        """Return merges of all pairs of pieces that form a piece, by its score."""
        ids = {piece.text: index for index, piece in enumerate(self.pieces)}
        pairs = [
            (-piece.score, -cut, piece.text)
            for piece in self.pieces
            for cut in range(1, len(piece.text))
            if piece.text[:cut] in ids and piece.text[cut:] in ids
        ]
        pairs.sort(key=lambda pair: pair[:2])
        merges = [(text[:-minus_cut], text[-minus_cut:]) for _, minus_cut, text in pairs]
        ids[_NO_PIECE] = len(self.pieces)
        return models.BPE(ids, merges, unk_token=_NO_PIECE, fuse_unk=True)

    def encode(self, text: str) -> list[int]:
        """Return indices of `pieces`; their number stands for unknown characters."""
        normalized = self.normalizer(text)
        if not normalized:
            return []
        (encoding,) = self._backend.encode_batch_fast([normalized], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


class Normalizer:
    """Normalization of a text: characters by rules, and spaces as `SPACE`.

    Args:
        settings: fields of the file, by number.
    """

    def __init__(self, settings: dict[int, int | bytes]) -> None:
        charsmap = settings.get(_CHARSMAP, b"")
        assert isinstance(charsmap, bytes), "read by its wire type"
        self._units: tuple[int, ...] = ()
        self._replacements = b""
        if charsmap:
            (size,) = struct.unpack_from("<I", charsmap)
            self._units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
            self._replacements = charsmap[4 + size :]
        self._prefixes = bool(settings.get(_DUMMY_PREFIX, 1))
        self._removes = bool(settings.get(_REMOVES_SPACES, 1))
        self._space = SPACE if settings.get(_ESCAPES_SPACES, 1) else " "

    def __call__(self, text: str) -> str:
        """Return the normalized text."""
        found: list[str] = []
        after_space = self._removes
        for part in self._parts(text.encode()):
            stripped = part.lstrip(" ") if after_space else part
            if stripped:
                found.append(stripped)
                after_space = self._removes and stripped.endswith(" ")
        joined = "".join(found)
        if not text or (self._removes and not joined):
            return ""
        escaped = (f" {joined}" if self._prefixes else joined).replace(" ", self._space)
        return escaped.rstrip(self._space) if self._removes else escaped

    def _parts(self, data: bytes) -> Iterator[str]:
        """Yield what takes the place of each stretch for which there is a rule, or of a character."""
        place = 0
        while place < len(data):
            length, replacement = self._rule(data, place)
            if length:
                yield replacement
            else:
                length = _length(data[place])
                yield data[place : place + length].decode()
            place += length

    def _rule(self, data: bytes, place: int) -> tuple[int, str]:
        """Return the bytes of the longest stretch with a rule, 0 if there is none, and its replacement."""
        units = self._units
        length, start = 0, 0
        if not units:
            return 0, ""
        node = _offset(units[0])
        for index in range(place, len(data)):
            node ^= data[index]
            if node >= len(units) or units[node] & 0x800000FF != data[index]:
                break
            has_value, unit = units[node] >> 8 & 1, units[node]
            node ^= _offset(unit)
            if has_value:
                length, start = index + 1 - place, units[node] & 0x7FFFFFFF
        if not length:
            return 0, ""
        end = self._replacements.index(b"\0", start)
        return length, self._replacements[start:end].decode()


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _length(first: int) -> int:
    """Return the bytes of a character from its first one."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _piece(fields: dict[int, int | bytes]) -> VocabularyPiece:
    text, score, kind = fields.get(1, b""), fields.get(2, 0), fields.get(3, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, int) or not isinstance(kind, int):
        raise TypeError("a piece has fields of other kinds")
    return VocabularyPiece(text.decode(), struct.unpack("<f", struct.pack("<I", score))[0], kind)


def _message(value: int | bytes) -> dict[int, int | bytes]:
    if not isinstance(value, bytes):
        raise TypeError("a message has another wire type")
    return dict(_fields(value))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: numbers, with fixed ones as unsigned, or bytes."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        if kind == _DELIMITED:
            size, place = _varint(data, place)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            size = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise TypeError(f"wire type {kind} at byte {place}")
        if place + size > len(data):
            raise IndexError(f"a field ends behind the file, at byte {place + size}")
        content = data[place : place + size]
        yield tag >> 3, content if kind == _DELIMITED else int.from_bytes(content, "little")
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number of variable length, and the place behind it."""
    found = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, place
    raise OverflowError(f"a number has more than 64 bits, at byte {place}")


def ids_of(pieces: Sequence[VocabularyPiece], vocabulary: dict[str, int], unknown: int) -> list[int]:
    """Return the vocabulary's id of each piece, and of unknown characters at the end."""
    return [*(vocabulary.get(piece.text, unknown) for piece in pieces), unknown]
