"""How texts are cut into words before byte pairs are merged, by the names that GGUF files give to that.

Each name stands for expressions that its models' own tokenizers were published with. One after the other cuts what
those before it left, into what it matches and what lies between.
"""

from __future__ import annotations

from dataclasses import dataclass

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
"""Letters of alphabets that have two cases, which DeepSeek's first models list one by one: not all of them."""


def _cl100k(digits: str, letters: str = r"\p{L}") -> str:
    """That of OpenAI's second generation, which takes so many digits together; `letters` are what words are made of."""
    symbols = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return rf"(?i:{_CONTRACTIONS})|{_BEFORE_WORD}[{letters}]+|{digits}|{symbols}|{_SPACES}"


def _o200k(
    digits: str,
    contractions: str = "",
    *,
    upper: str = _UPPER,
    lower: str = _LOWER,
    symbols: str = _SYMBOLS,
) -> str:
    """That of the third, which cuts where lower case ends."""
    words = f"{_BEFORE_WORD}{upper}*{lower}+{contractions}|{_BEFORE_WORD}{upper}+{lower}*{contractions}"
    return f"{words}|{digits}|{symbols}|{_SPACES}"


@dataclass(frozen=True)
class PreTokenizer:
    """`ignores_merges`: a word that is a token is that one, whatever merges would make of it."""

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    """Unless the file says otherwise."""
    composes: bool = False
    """Whether texts are brought into Unicode's form NFC first."""


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
        # Threes of digits that are counted from the last one.
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        # Scripts that have no spaces between words.
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
"""By `tokenizer.ggml.pre`."""
