"""Builds the tokenizer of a GGUF file from the tables in it, with the `tokenizers` library.

Kinds of tables:
- `llama`: SentencePiece's pieces with scores; the pair that makes the best piece is merged first (Kudo and Richardson,
  2018, arXiv:1808.06226).
- `t5`: pieces with log likelihoods, of which a text is cut into the likeliest (Unigram: Kudo, 2018, arXiv:1804.10959).
- `gpt2`: byte-level BPE with a list of merges (Radford et al., 2019).
- `gemma4`: a list of merges over SentencePiece's characters.
- `bert`: WordPiece, which takes the longest pieces first (Schuster and Nakajima, 2012).
Invariant: torch-free; every id is that of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.gguf.model import GgufModel
from quire.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.models.json_object import JsonObject

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Values of `token_type`; the rest are plain (1) or unused (5)."""
_TEMPLATE = "tokenizer.chat_template"
_NAMES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",  # as the format spells it
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}
"""Special tokens in tokenizer_config.json -> in `tokenizer.ggml`."""
_BERT = "bert"
_INSIDE = "##"
"""Marks WordPiece's tokens that continue a word; the format marks those that begin one instead, by `SPACE`."""
_BERT_IDS = {
    "cls": 101,
    "seperator": 102,
    "unknown": 100,
}  # where a file names none, those of Google's vocabularies
_BERT_NAMES = {"cls": "bos", "seperator": "eos"}  # other names that converters give them
_SAY_NOTHING = frozenset(
    (
        "scores",
        "token_type",
        "token_type_count",
        "merges",
        "pre",
        "hf_json",
        "add_space_prefix",
        "add_eos_token",
    )
)
"""Keys that some converters write for kinds of tables that have no use for them."""
_ALWAYS_ADDED = {"gemma4": ("bos",)}
"""Kinds -> tokens that texts get whatever the file says: early files of Gemma 4 wrongly say that they get no `bos`."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True)
class GgufTokenizer:
    """What a file says of its tokenizer; `named_tokens` has the keys of tokenizer_config.json."""

    backend: Tokenizer
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer and chat templates of a model in GGUF.

    Raises:
        ModelLoadError: a table is missing, malformed, or does not fit another.
        UnsupportedModelError: the kind of tokenizer, or how it cuts words, is one that quire does not know.
    """
    model = GgufModel(path)
    tables = _Tables(model.about("tokenizer.ggml"))
    if tables.kind not in _KINDS:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.model is {tables.kind!r}; known are {', '.join(_KINDS)}"
        )
    backend, added = _KINDS[tables.kind](tables)
    _add_tokens(backend, tables)
    _add_around(backend, tables, added)
    _warn_of_unread(tables.about)
    return GgufTokenizer(backend, tables.named_tokens(), dict(_chat_templates(model)))


class _Tables:
    """The vocabulary of a file: `tokens` by id, and what is said of each of them."""

    def __init__(self, about: JsonObject) -> None:
        self.about = about
        self.kind = about.text("model")
        self.tokens = about.texts("tokens")
        self.types = self.numbers("token_type") if "token_type" in about else [1] * len(self.tokens)
        if self.kind == _BERT:
            self.tokens = tuple(map(_piece, self.tokens, self.types))
        self.vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocab) < len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.vocab[token] != index)
            first = self.tokens.index(twice)
            raise ModelLoadError(f"{about.where}: tokens {first} and {self.vocab[twice]} are both {twice!r}")

    def numbers(self, key: str) -> list[Any]:
        """A number for each token."""
        values = list(self.about.numbers(key))
        if len(values) != len(self.tokens):
            raise ModelLoadError(
                f"{self.about.where}: {key} has {len(values)} values for {len(self.tokens)} tokens"
            )
        return values

    def of_type(self, kind: int) -> Iterator[str]:
        return (token for token, its in zip(self.tokens, self.types, strict=True) if its == kind)

    def named(self, name: str) -> str | None:
        """The token that the file names so, "bos" or another; None if it names none."""
        index = self.about.optional_integer(f"{name}_token_id", low=0)
        if index is not None and index >= len(self.tokens):
            raise self.about.wrong(f"{name}_token_id", f"below {len(self.tokens)}, the number of tokens")
        return None if index is None else self.tokens[index]

    def named_tokens(self) -> dict[str, str]:
        """The special tokens by their names in tokenizer_config.json; `bos` and `eos` are checked."""
        self.named("bos"), self.named("eos")
        ids = {ours: self.about.get(f"{theirs}_token_id") for ours, theirs in _NAMES.items()}
        count = len(self.tokens)
        return {
            f"{name}_token": self.tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < count
        }


Made = tuple[Tokenizer, tuple[str, ...]]
"""A tokenizer, and which of "bos" and "eos" texts get unless the file says otherwise."""


def _sentence_pieces(tables: _Tables) -> Made:
    prefixed = tables.about.flag("add_space_prefix", True)
    unknown = tables.named("unknown") or next(tables.of_type(UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            vocab=tables.vocab,
            merges=_merges_of(tables),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    before = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend, ("bos",)


def _merges_of(tables: _Tables) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best one first; of those for one piece, that with the longest left."""
    scores, vocab = tables.numbers("scores"), tables.vocab
    pairs = [
        (-scores[index], -cut, piece)
        for piece, index in vocab.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    pairs.sort(key=itemgetter(0, 1))
    return [(piece[:-minus_cut], piece[-minus_cut:]) for _, minus_cut, piece in pairs]


def _unigrams(tables: _Tables) -> Made:
    about = tables.about
    scheme = "always" if about.flag("add_space_prefix", True) else "never"
    unknown = tables.named("unknown") or next(tables.of_type(UNKNOWN), None)
    backend = Tokenizer(
        models.Unigram(
            list(zip(tables.tokens, tables.numbers("scores"), strict=True)),
            unk_id=None if unknown is None else tables.vocab[unknown],
            byte_fallback=any(True for _ in tables.of_type(BYTE)),
        )
    )
    steps = [_characters(about)] if "precompiled_charsmap" in about else []
    if about.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(SPACE, scheme, split=False)]
    )
    return backend, ("eos",)


def _characters(about: JsonObject) -> Any:
    """What SentencePiece makes of characters before it looks for pieces, in its own compiled form."""
    values = about.numbers("precompiled_charsmap")
    try:
        return normalizers.Precompiled(bytes(map(int, values)))
    except Exception as error:
        raise ModelLoadError(f"{about.where}: precompiled_charsmap cannot be read: {error}") from error


def _byte_pairs(tables: _Tables) -> Made:
    cut = _pre_tokenizer(tables.about)
    backend = Tokenizer(_merging(tables, ignore_merges=cut.ignores_merges))
    if cut.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in cut.expressions]
    prefixed = tables.about.flag("add_space_prefix", False)
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend, ("bos",) if cut.adds_bos else ()


def _merged_pieces(tables: _Tables) -> Made:
    """Gemma 4's: merges do not cross newlines."""
    backend = Tokenizer(
        _merging(
            tables,
            unk_token=tables.named("unknown") or next(tables.of_type(UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend, ("bos",)


def _word_pieces(tables: _Tables) -> Made:
    """BERT's: texts get the first and the last token whatever the flags say, as in llama.cpp."""
    about = tables.about
    _ = about.get("add_bos_token"), about.get("add_sep_token")
    unknown, first, last = (_bert_token(tables, name) for name in ("unknown", "cls", "seperator"))
    lowercase = about.flag("normalizer.lowercase", True)
    backend = Tokenizer(
        models.WordPiece(vocab=tables.vocab, unk_token=unknown, continuing_subword_prefix=_INSIDE)
    )
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=about.flag("normalizer.strip_accents", lowercase)
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(_INSIDE)
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, tables.vocab[token]) for token in dict.fromkeys((first, last))],
    )
    return backend, ()


def _piece(token: str, kind: int) -> str:
    """Return a token of WordPiece as vocabularies of BERT write it; those in brackets are no parts of words."""
    if token.startswith(SPACE):
        return token[len(SPACE) :]
    is_bracketed = token[:1] == "[" and token[-1:] == "]" and len(token) > 2
    return token if is_bracketed or kind in (UNKNOWN, CONTROL, USER_DEFINED) else _INSIDE + token


def _bert_token(tables: _Tables, name: str) -> str:
    other = tables.about.integer(f"{_BERT_NAMES.get(name, name)}_token_id", _BERT_IDS[name], low=0)
    index = tables.about.integer(f"{name}_token_id", other, low=0)
    if index >= len(tables.tokens):
        raise tables.about.wrong(f"{name}_token_id", f"below {len(tables.tokens)}, the number of tokens")
    return tables.tokens[index]


def _pre_tokenizer(about: JsonObject) -> PreTokenizer:
    if "pre" not in about:
        logger.warning(
            "%s: pre is missing, as in files of before May 2024: words are cut by default, and not as the model's "
            "own tokenizer did",
            about.where,
        )
    name = about.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(f"{about.where}: pre is {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _merging(tables: _Tables, **options: Any) -> models.BPE:
    """The model of byte pairs; it looks up each merge, so that only if it fails are they looked at one by one."""
    merges = tables.about.texts("merges")
    try:
        return models.BPE(
            vocab=tables.vocab, merges=[merge.partition(" ")[::2] for merge in merges], **options
        )
    except Exception:
        for merge in merges:
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= tables.vocab.keys():
                raise ModelLoadError(
                    f"{tables.about.where}: merge {merge!r} is not of tokens, or does not make one"
                ) from None
        raise


_KINDS: dict[str, Callable[[_Tables], Made]] = {
    "llama": _sentence_pieces,
    "t5": _unigrams,
    "gpt2": _byte_pairs,
    "gemma4": _merged_pieces,
    _BERT: _word_pieces,
}
"""By `tokenizer.ggml.model`."""


def _add_tokens(backend: Tokenizer, tables: _Tables) -> None:
    """What is a token wherever it is spelled out: unknown and control tokens, which are special, and those of users."""
    special = [
        AddedToken(token, normalized=False, special=True)
        for kind in (UNKNOWN, CONTROL)
        for token in tables.of_type(kind)
    ]
    plain = [AddedToken(token, normalized=False) for token in tables.of_type(USER_DEFINED)]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_around(backend: Tokenizer, tables: _Tables, added: tuple[str, ...]) -> None:
    """The tokens that go before and behind every text."""
    if backend.post_processor is not None:
        return
    always = _ALWAYS_ADDED.get(tables.kind, ())
    around = [
        name
        for name in ("bos", "eos")
        if tables.about.flag(f"add_{name}_token", name in added) or name in always
    ]
    named = {name: tables.named(name) for name in around}
    for name, token in named.items():
        if token is None and f"add_{name}_token" in tables.about:
            raise ModelLoadError(
                f"{tables.about.where}: add_{name}_token is true, and there is no {name}_token_id"
            )
    bos, eos = named.get("bos"), named.get("eos")
    tokens = [token for token in (bos, eos) if token is not None]
    if tokens:
        backend.post_processor = processors.TemplateProcessing(
            single=[token for token in (bos, "$A", eos) if token is not None],
            special_tokens=[(token, tables.vocab[token]) for token in dict.fromkeys(tokens)],
        )


def _warn_of_unread(about: JsonObject) -> None:
    """Name keys that may change what a text's tokens are, and that no kind of tables here has a use for."""
    unread = about.values.keys() - about.asked - _SAY_NOTHING
    found = sorted(
        key for key in unread if not key.endswith(("_token_id", "_token_ids")) and about.values[key]
    )
    if found:
        logger.warning("%s: not read: %s", about.where, ", ".join(found))


def _chat_templates(model: GgufModel) -> Iterator[tuple[str, str]]:
    for key, template in model.metadata.items():
        if (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")) and isinstance(template, str):
            yield key.removeprefix(_TEMPLATE).removeprefix(".") or "default", template
