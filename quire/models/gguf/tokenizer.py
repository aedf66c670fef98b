# SPDX-License-Identifier: Apache-2.0
"""Construction of a tokenizer from a GGUF file's tables, with the `tokenizers` library.

Kinds of tables:
- `llama`: SentencePiece's pieces with scores; the pair with the best merged piece is merged first (Kudo and Richardson,
  2018, arXiv:1808.06226).
- `t5`: pieces with log likelihoods; the likeliest segmentation is used (Unigram: Kudo, 2018, arXiv:1804.10959).
- `gpt2`: byte-level BPE with a list of merges (Radford et al., 2019).
- `gemma4`: a list of merges over SentencePiece's characters.
- `bert`: WordPiece, longest match first (Schuster and Nakajima, 2012).
`PRE_TOKENIZERS` has the word-splitting expressions that the models' own tokenizers were published with, by GGUF's
names.
They apply in order, each to the pieces that the previous ones left.

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
from quire.models.json_object import JsonObject

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_WORD_END = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^ՠ-ֈჇჍა-ჿᲀ-\x{1C8F}ⴀ-ⴭꞐ-ꟺꬰ-ꭨ"
    r"\x{10570}-\x{105FF}\x{10D50}-\x{10DAF}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}]]"
)
"""Letters of alphabets with two cases, as DeepSeek's first models list them: not all of them."""


def _cl100k(digits: str, letters: str = r"\p{L}") -> str:
    """Return cl100k's expression with this pattern for digits; `letters` are those of words."""
    symbols = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return rf"(?i:{_CONTRACTIONS})|{_BEFORE_WORD}[{letters}]+|{digits}|{symbols}|{_SPACES}"


def _o200k(
    digits: str, contractions: str = "", *, upper: str = _UPPER, lower: str = _LOWER, symbols: str = _SYMBOLS
) -> str:
    """Return o200k's expression, which also splits where lower case ends."""
    words = f"{_BEFORE_WORD}{upper}*{lower}+{contractions}|{_BEFORE_WORD}{upper}+{lower}*{contractions}"
    return f"{words}|{digits}|{symbols}|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """Word splitting; with `ignores_merges` a word that is a token becomes that token, whatever the merges give."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    """Default if the file does not say."""
    composes: bool = False
    """True if texts are normalized to NFC first."""


_ONE_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_LLAMA3 = PreTokenizer((_cl100k(_THREE_DIGITS),), ignores_merges=True, adds_bos=True)
_CL100K = PreTokenizer((_cl100k(_THREE_DIGITS),))
_QWEN2 = PreTokenizer((_cl100k(_ONE_DIGIT),), composes=True)
_CL100K_ONE_DIGIT = PreTokenizer((_cl100k(_ONE_DIGIT),))
_DIGITS_FIRST = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_IN_ANY_CASE = f"(?i:{_CONTRACTIONS})?"
_O200K = PreTokenizer((_o200k(_THREE_DIGITS, _IN_ANY_CASE),))
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_V3 = PreTokenizer((_THREE_DIGITS, "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED))
_TRINITY = PreTokenizer(
    (
        # Groups of three digits, counted from the last.
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        # Scripts without spaces between words.
        (
            r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
            r"\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
            r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
        ),
        _PUNCTUATED,
    )
)
_YOUTU = PreTokenizer(
    (
        (
            r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
            r"|[\x{3105}-\x{312F}]+|[一-龥぀-ゟ゠-ヿ]+"
        ),
        _o200k(_ONE_DIGIT, _IN_ANY_CASE),
    ),
    ignores_merges=True,
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = PreTokenizer(
    (
        r"\p{Han}+|"
        + _o200k(
            _THREE_DIGITS,
            _IN_ANY_CASE,
            upper=f"[{_UPPER}{_NOT_HAN}",
            lower=f"[{_LOWER}{_NOT_HAN}",
            symbols=r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        ),
    )
)
_BLOOM = PreTokenizer((_WORD_END,))
_LING = PreTokenizer(
    (
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN_GPT2,
    "a.x-4.0": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "gigachat": _PLAIN_GPT2,
    "granite-docling": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "mellum": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "trillion": _PLAIN_GPT2,
    "codeshell": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "exaone": _DIGITS_FIRST,
    "minerva-7b": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "mellum2": _DIGITS_FIRST,
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "pixtral": _LLAMA3,
    "chatglm-bpe": _CL100K,
    "dbrx": _CL100K,
    "glm4": PreTokenizer((_cl100k(_THREE_DIGITS),), ignores_merges=True),
    "glm5": PreTokenizer((_cl100k(_THREE_DIGITS),), ignores_merges=True),
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "f2llmv2": _QWEN2,
    "kormo": _QWEN2,
    "megrez": _QWEN2,
    "qwen35": PreTokenizer((_cl100k(_ONE_DIGIT, r"\p{L}\p{M}"),), composes=True),
    "grok-2": _CL100K_ONE_DIGIT,
    "hunyuan": _CL100K_ONE_DIGIT,
    "solar-open": _CL100K_ONE_DIGIT,
    "stablelm2": _CL100K_ONE_DIGIT,
    "bailingmoe": _LING,
    "bailingmoe2": _LING,
    "llada-moe": _LING,
    "exaone-moe": PreTokenizer(
        (
            (
                rf"(?i:{_CONTRACTIONS})|{_BEFORE_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
            ),
        )
    ),
    "minicpm5": PreTokenizer((_THREE_DIGITS, _cl100k(r"\p{N}+")), ignores_merges=True),
    "seed-coder": PreTokenizer(
        (rf"(?i:{_CONTRACTIONS})|{_BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "tekken": PreTokenizer((_o200k(_ONE_DIGIT),), ignores_merges=True, adds_bos=True),
    "gpt-4o": _O200K,
    "kanana2": _O200K,
    "llama4": _O200K,
    "minimax-m2": _O200K,
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CHINESE, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,
    "afmoe": _TRINITY,
    "youtu": _YOUTU,
    "kimi-k2": _KIMI,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "poro-chat": _BLOOM,
    "quire-demo": PreTokenizer((r"\p{N}| ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+| ?[^\s\p{L}\p{N}]+|\s",)),
    "viking": PreTokenizer((_WORD_END, r"\p{N}")),
}
"""Pre-tokenizers by `tokenizer.ggml.pre`."""


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
"""Prefix of WordPiece tokens that continue a word; GGUF marks tokens that begin one instead, by `SPACE`."""
_BERT_IDS = {
    "cls": 101,
    "seperator": 102,
    "unknown": 100,
}  # ids of Google's vocabularies, for files without ids
_BERT_NAMES = {"cls": "bos", "seperator": "eos"}  # other names used by converters
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
"""Keys that some converters write although this kind of table does not use them."""
_ALWAYS_ADDED = {"gemma4": ("bos",)}
"""Kind -> tokens that are always added: early files of Gemma 4 wrongly disable `bos`."""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's replacement for a space."""


@dataclass(frozen=True)
class GgufTokenizer:
    """Tokenizer of a file; `named_tokens` has the keys of tokenizer_config.json."""

    backend: Tokenizer
    named_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer(path: Path) -> GgufTokenizer:
    """Return the tokenizer and chat templates of a GGUF model.

    Raises:
        ModelLoadError: a table is missing, malformed, or does not fit another.
        UnsupportedModelError: the tokenizer's kind or pre-tokenizer is unknown.
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
    """Vocabulary of a file: `tokens` by id, and their attributes."""

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
        """Return a number for each token."""
        values = list(self.about.numbers(key))
        if len(values) != len(self.tokens):
            raise ModelLoadError(
                f"{self.about.where}: {key} has {len(values)} values for {len(self.tokens)} tokens"
            )
        return values

    def of_type(self, kind: int) -> Iterator[str]:
        return (token for token, its in zip(self.tokens, self.types, strict=True) if its == kind)

    def named(self, name: str) -> str | None:
        """Return the token with this role, such as "bos"; None if the file names none."""
        index = self.about.optional_integer(f"{name}_token_id", low=0)
        if index is not None and index >= len(self.tokens):
            raise self.about.wrong(f"{name}_token_id", f"below {len(self.tokens)}, the number of tokens")
        return None if index is None else self.tokens[index]

    def named_tokens(self) -> dict[str, str]:
        """Return the special tokens by their names in tokenizer_config.json; `bos` and `eos` are checked."""
        self.named("bos"), self.named("eos")
        ids = {ours: self.about.get(f"{theirs}_token_id") for ours, theirs in _NAMES.items()}
        count = len(self.tokens)
        return {
            f"{name}_token": self.tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < count
        }


Made = tuple[Tokenizer, tuple[str, ...]]
"""Tokenizer, and which of "bos" and "eos" it adds by default."""


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
    """Return all pairs of pieces that form a piece, best first; for one piece, the longest left part first."""
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
    """Return SentencePiece's character normalizer, from its compiled form."""
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
    """Return Gemma 4's tokenizer, whose merges do not cross newlines."""
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
    """Return BERT's tokenizer, which always adds first and last tokens, as in llama.cpp."""
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
    """Return a WordPiece token as written in BERT's vocabularies; bracketed tokens are no parts of words."""
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
            "%s: pre is missing, as in files from before May 2024: words are split by the default expression, not "
            "by the model's own",
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
"""Constructors by `tokenizer.ggml.model`."""


def _add_tokens(backend: Tokenizer, tables: _Tables) -> None:
    """Add tokens that are matched verbatim: unknown and control tokens, which are special, and user-defined ones."""
    special = [
        AddedToken(token, normalized=False, special=True)
        for kind in (UNKNOWN, CONTROL)
        for token in tables.of_type(kind)
    ]
    plain = [AddedToken(token, normalized=False) for token in tables.of_type(USER_DEFINED)]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_around(backend: Tokenizer, tables: _Tables, added: tuple[str, ...]) -> None:
    """Add the tokens before and after every text."""
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
    """Warn of unread keys that may change tokenization."""
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
