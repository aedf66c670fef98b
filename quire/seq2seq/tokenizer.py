# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of SentencePiece models beside a vocabulary of its own ids: Marian's and M2M-100's.

Texts are cut by the source's model; outputs, and texts of decoder prompts, are of the target, whose model and
vocabulary may differ. Ids are those of transformers' tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, processors

from quire.engine.added_tokens import read_settings
from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_files import read_chat_templates
from quire.errors import ModelLoadError
from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, read_json_object
from quire.seq2seq.pieces import SPACE, PieceModel, ids_of

VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"
MARIAN_FILES = ("source.spm", "target.spm", VOCABULARY)
M2M100_FILES = ("sentencepiece.bpe.model", VOCABULARY)
_DEFAULTS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_M2M100_DEFAULTS = {**_DEFAULTS, "bos_token": "<s>", "sep_token": "</s>"}
_LANGUAGE_CODES = {
    "m2m100": (
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu "
        "hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt "
        "ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": "en ha is ja cs ru zh de",
}
"""Languages of M2M-100's checkpoints, in the order of their tokens behind the vocabulary."""
_CODE = re.compile(r">>.*?<<", re.DOTALL)


class PieceTokenizer(Tokenizer):
    """Tokenizer that cuts texts by SentencePiece models.

    Args:
        backend: the target's vocabulary and special tokens, with what decodes.
        source, target: model, and the vocabulary's id of each piece.
        codes: ids of tokens such as >>fr<< that may begin a text; None: the model has none.
        literals: special tokens with their ids in the source's vocabulary.
        around: ids before and behind a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        *,
        source: tuple[PieceModel, list[int]],
        target: tuple[PieceModel, list[int]],
        codes: Mapping[str, int] | None,
        literals: Mapping[str, int],
        around: tuple[list[int], list[int]],
    ) -> None:
        super().__init__(backend, named_tokens, chat_templates)
        self._source, self._target, self._codes = source, target, codes
        self._literals, self._around = dict(literals), around
        longest_first = sorted(literals, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """See `Tokenizer.encode`."""
        ids = self._encoded(text, self._source, allow_special=allow_special)
        before, behind = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *behind]

    def encode_target(self, text: str) -> list[int]:
        """See `Tokenizer.encode_target`."""
        return self._encoded(text, self._target, allow_special=True)

    def _encoded(self, text: str, model: tuple[PieceModel, list[int]], *, allow_special: bool) -> list[int]:
        self.check_unicode(text)
        ids: list[int] = []
        place = 0
        for found in self._special.finditer(text) if allow_special else ():
            ids += self._cut(text[place : found.start()], model)
            special = found.group()
            own = self._literals[special] if model is self._source else self.id_of(special)
            ids.append(model[1][-1] if own is None else own)
            place = found.end()
        return ids + self._cut(text[place:], model)

    def _cut(self, text: str, model: tuple[PieceModel, list[int]]) -> list[int]:
        pieces, ids = model
        code = _CODE.match(text) if self._codes is not None else None
        if code is None or self._codes is None:
            return [ids[piece] for piece in pieces.encode(text)]
        first = self._codes.get(code.group(), ids[-1])
        return [first, *(ids[piece] for piece in pieces.encode(text[code.end() :]))]


def read_pieces(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint with SentencePiece models beside a vocabulary; None: it has none.

    Raises:
        ModelLoadError: a file is malformed.
    """
    if all(has_file(directory / name) for name in MARIAN_FILES):
        return _marian(directory)
    if all(has_file(directory / name) for name in M2M100_FILES):
        return _m2m100(directory)
    return None


def _marian(directory: Path) -> Tokenizer:
    settings = read_settings(directory)
    named = {**_DEFAULTS, **settings.literals}
    vocabulary = target = _vocabulary(directory / VOCABULARY)
    if settings.file.flag("separate_vocabs", False):
        target = _vocabulary(directory / TARGET_VOCABULARY)
    ids = {name: _id_of(vocabulary, name, directory) for name in named.values()}
    backend = _backend(target, [name for name in named.values() if name in target], named["unk_token"])
    end = named["eos_token"]
    if end in target:
        backend.post_processor = processors.TemplateProcessing(
            f"$A {end}", special_tokens=[(end, target[end])]
        )
    return PieceTokenizer(
        backend,
        named,
        read_chat_templates(directory, settings.file),
        source=_model(directory / MARIAN_FILES[0], vocabulary, named["unk_token"]),
        target=_model(directory / MARIAN_FILES[1], target, named["unk_token"]),
        codes=vocabulary,
        literals=ids,
        around=([], [ids[end]]),
    )


def _m2m100(directory: Path) -> Tokenizer:
    settings = read_settings(directory)
    named = {**_M2M100_DEFAULTS, **settings.literals}
    vocabulary = _vocabulary(directory / VOCABULARY)
    tokens = _language_tokens(settings.file)
    size = len(vocabulary)
    languages = {token: size + place for place, token in enumerate(tokens)}
    backend = _backend(vocabulary | languages, [*named.values(), *tokens], named["unk_token"])
    spoken = f"__{settings.file.text('src_lang', 'en') if 'src_lang' in settings.file else 'en'}__"
    if spoken not in languages:
        raise ModelLoadError(
            f"{settings.file.where}: src_lang must be one of the model's languages, got {spoken!r}"
        )
    end = named["eos_token"]
    first, last = languages[spoken], _id_of(vocabulary, end, directory)
    backend.post_processor = processors.TemplateProcessing(
        f"{spoken} $A {end}", special_tokens=[(spoken, first), (end, last)]
    )
    model = _model(directory / M2M100_FILES[0], vocabulary, named["unk_token"])
    literals = {name: _id_of(vocabulary, name, directory) for name in named.values()}
    return PieceTokenizer(
        backend,
        named,
        read_chat_templates(directory, settings.file),
        source=model,
        target=model,
        codes=None,
        literals=literals | languages,
        around=([first], [last]),
    )


def _language_tokens(file: JsonObject) -> list[str]:
    kind = file.choice("language_codes", tuple(_LANGUAGE_CODES), "m2m100")
    return [f"__{code}__" for code in _LANGUAGE_CODES[kind].split()]


def _model(path: Path, vocabulary: dict[str, int], unknown: str) -> tuple[PieceModel, list[int]]:
    model = PieceModel(path)
    return model, ids_of(model.pieces, vocabulary, _id_of(vocabulary, unknown, path))


def _vocabulary(path: Path) -> dict[str, int]:
    values: dict[str, Any] = read_json_object(path).values
    if not all(type(token_id) is int and 0 <= token_id < 2**24 for token_id in values.values()):
        raise ModelLoadError(f"{path}: must be a JSON object of tokens and their ids")
    return values


def _id_of(vocabulary: Mapping[str, int], token: str, where: Path) -> int:
    if token not in vocabulary:
        raise ModelLoadError(
            f"{where}: its vocabulary has no token {token!r:.100}, which tokenizer_config.json names"
        )
    return vocabulary[token]


def _backend(vocabulary: dict[str, int], special: list[str], unknown: str) -> tokenizers.Tokenizer:
    """Return the vocabulary with its special tokens, which decodes pieces."""
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.decoder = decoders.Metaspace(SPACE, "always", split=False)
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in dict.fromkeys(special)]
    )
    return backend
