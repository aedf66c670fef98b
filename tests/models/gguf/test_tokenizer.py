# SPDX-License-Identifier: Apache-2.0
"""Tokenizers out of GGUF's tables, against those that the tables were made of, on 5,000 strings each."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from quire.engine.tokenizer import Tokenizer, max_chars_per_token
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.gguf.tokenizer import PRE_TOKENIZERS, SPACE
from tests.fixtures.folded import folded
from tests.fixtures.gguf_models import DEMO, add_tokenizer, finish
from tests.fixtures.vocabularies import (
    SPECIAL,
    corpus,
    gpt2,
    sentence_pieces,
    strings,
    trained,
    write_vocabulary,
)


def written(path: Path, backend: tokenizers.Tokenizer, pre: str, **more: Any) -> Path:
    """A byte-level tokenizer's tables."""
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, backend, pre)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return path


def assert_same(ours: Tokenizer, theirs: tokenizers.Tokenizer) -> None:
    for text in strings():
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def of_expression(expression: str) -> Any:
    cut = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama3() -> tokenizers.Tokenizer:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    return trained(of_expression(TikTokenConverter("").pattern))


def qwen2() -> tokenizers.Tokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return trained(of_expression(PRETOKENIZE_REGEX), normalizers.NFC())


def smollm() -> tokenizers.Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return trained(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def demo() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


BYTE_LEVEL: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama-bpe": llama3,
    "qwen2": qwen2,
    "gpt-2": gpt2,
    "smollm": smollm,
    "quire-demo": demo,
}


@pytest.mark.more
@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_pairs(pre: str, tmp_path: Path) -> None:
    theirs = BYTE_LEVEL[pre]()
    ours = Tokenizer.from_dir(written(tmp_path / "x.gguf", theirs, pre, add_bos_token=False))
    assert_same(ours, theirs)
    assert ours.special_tokens == {
        token for token in ours.special_tokens if theirs.token_to_id(token) is not None
    }


@folded("pre", PRE_TOKENIZERS)
def test_every_way_to_cut_words_keeps_the_text(pre: str, tmp_path: Path) -> None:
    backend = gpt2()
    ours = Tokenizer.from_dir(written(tmp_path / "x.gguf", backend, pre, add_bos_token=False))
    assert max_chars_per_token(ours._backend) is not None
    for text in strings(300):
        kept = Tokenizer(backend, {}).encode(text)
        composed = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].composes else text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == composed
        assert ours.encode(text, allow_special=False) != kept or not any(s in text for s in SPECIAL)


def merged_by_score(text: str, tokens: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's way, said plainly: the best piece that two neighbors make, the leftmost of the best first."""
    pieces = list(text)
    while True:
        made = [(scores[tokens[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in tokens]
        if not made:
            break
        place = -max(made)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [
        index
        for piece in pieces
        for index in ([tokens[piece]] if piece in tokens else [3 + byte for byte in piece.encode()])
    ]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentence_pieces(prefixed: bool, tmp_path: Path) -> None:
    tokens, scores, types = sentence_pieces()
    path = write_vocabulary(
        tmp_path / "x.gguf",
        "llama",
        tokens,
        types,
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_space_prefix=prefixed,
    )
    ours, vocab = Tokenizer.from_dir(path), {token: index for index, token in enumerate(tokens)}
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")
    assert max_chars_per_token(ours._backend) is not None
    for text in strings():
        plain = text.replace("<s>", "").replace("</s>", "")
        written_so = (SPACE if prefixed and plain else "") + plain.replace(" ", SPACE)
        ids = merged_by_score(written_so, vocab, scores)
        assert ours.encode(plain) == [1, *ids], plain
        # A first space is taken away, which the text's own is not when one went before it.
        assert ours.decode(ids) == plain


def unigrams(*, extra_spaces: bool) -> tokenizers.Tokenizer:
    """Unigram as converters of SentencePiece's models make it, with a table of characters."""
    backend = tokenizers.Tokenizer(models.Unigram())
    steps: list[Any] = [] if extra_spaces else [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    backend.decoder = decoders.Metaspace(SPACE, "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=700, show_progress=False, special_tokens=["<unk>", "</s>"], unk_token="<unk>"
    )
    backend.train_from_iterator(corpus(), trainer)
    return backend


@pytest.mark.parametrize("extra_spaces", [True, False])
def test_unigrams(extra_spaces: bool, tmp_path: Path) -> None:
    theirs = unigrams(extra_spaces=extra_spaces)
    vocab = json.loads(theirs.to_str())["model"]["vocab"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL] + [TokenType.NORMAL] * (len(vocab) - 2)
    path = write_vocabulary(
        tmp_path / "x.gguf",
        "t5",
        [token for token, _ in vocab],
        types,
        token_scores=[score for _, score in vocab],
        eos_token_id=1,
        unk_token_id=0,
        remove_extra_whitespaces=not extra_spaces,
    )
    ours = Tokenizer.from_dir(path)
    for text in strings():
        ids = theirs.encode(text).ids
        assert ours.encode(text) == [*ids, 1], text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids), text


def test_special_tokens_stand_between_texts_of_their_own(tmp_path: Path) -> None:
    tokens, scores, types = sentence_pieces()
    path = write_vocabulary(
        tmp_path / "x.gguf", "llama", tokens, types, token_scores=scores, add_bos_token=False
    )
    ours = Tokenizer.from_dir(path)
    assert ours.encode("it<s>it") == [*ours.encode("it"), 1, *ours.encode("it")]
    assert 1 not in ours.encode("it<s>it", allow_special=False)


def test_special_tokens_around_a_text_follow_the_metadata(tmp_path: Path) -> None:
    backend = gpt2()
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    for pre, more, expected in (
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([2], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([2], [3])),
    ):
        ours = Tokenizer.from_dir(written(tmp_path / "x.gguf", backend, pre, **ends, **more))
        first, last = expected
        assert ours.encode("it") == [*first, *ours.encode("it", add_special_tokens=False), *last]


def test_chat_templates(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.gguf",
        gpt2(),
        "gpt-2",
        chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
    )
    ours = Tokenizer.from_dir(path)
    assert ours.chat_template == "A"
    assert ours.chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.item(26)
@folded(
    ("kind", "more", "error", "words"),
    [
        ("rwkv", {}, UnsupportedModelError, "tokenizer.ggml.model is 'rwkv'; known are llama, t5, gpt2"),
        (
            "t5",
            {"token_scores": [0.0] * 3, "precompiled_charsmap": bytes(3)},
            ModelLoadError,
            "precompiled_charsmap cannot be read",
        ),
        ("gpt2", {"tokenizer_pre": "none"}, UnsupportedModelError, "pre is 'none'; known are default, gpt-2"),
        ("gpt2", {"token_merges": ["a c"]}, ModelLoadError, "merge 'a c' is not of tokens"),
        ("gpt2", {"token_merges": ["ab"]}, ModelLoadError, "merge 'ab' is not of tokens"),
        ("gpt2", {}, ModelLoadError, "key 'merges' is missing"),
        ("llama", {}, ModelLoadError, "key 'scores' is missing"),
        ("llama", {"token_scores": [0.0]}, ModelLoadError, "scores has 1 values for 3 tokens"),
        (
            "llama",
            {"token_scores": [0.0] * 3, "bos_token_id": 3},
            ModelLoadError,
            "bos_token_id must be below 3",
        ),
        (
            "llama",
            {"token_scores": [0.0] * 3, "add_bos_token": True},
            ModelLoadError,
            "there is no bos_token_id",
        ),
    ],
)
def test_tables_that_do_not_fit(
    kind: str, more: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "x.gguf", kind, ["a", "b", "ab"], [1, 1, 1], **more)
    with pytest.raises(error, match=words):
        Tokenizer.from_dir(path)


@pytest.mark.item(26)
def test_a_token_twice(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "x.gguf", "llama", ["a", "b", "a"], [1, 1, 1])
    with pytest.raises(ModelLoadError, match="tokens 0 and 2 are both 'a'"):
        Tokenizer.from_dir(path)


@pytest.mark.parametrize("lowercase", [True, False])
def test_gguf_word_pieces_match_transformers(lowercase: bool, tmp_path: Path) -> None:
    """Tokens that begin a word have SentencePiece's space in the file, and those inside a word nothing."""
    named = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    characters = sorted({character for text in corpus() for character in text if not character.isspace()})
    theirs = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=named, initial_alphabet=characters[:50], show_progress=False
    )
    theirs.train_from_iterator(corpus(), trainer)
    theirs.decoder = decoders.WordPiece()
    theirs.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    vocab = sorted(theirs.get_vocab(), key=theirs.get_vocab().__getitem__)
    stored = [
        token if token in named else token[2:] if token.startswith("##") else SPACE + token for token in vocab
    ]
    types = [TokenType.CONTROL if token in named else TokenType.NORMAL for token in vocab]
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(stored)
    writer.add_token_types(types)
    for key, index in {"unknown": 1, "cls": 2, "seperator": 3, "padding": 0, "mask": 4}.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", index)
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowercase)
    finish(writer)
    ours = Tokenizer.from_dir(path)
    assert_same(ours, theirs)
    assert ours.named_tokens == {
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }
    pair = theirs.encode("the naive", "résumé")
    template = ours.pair_template
    first, second = (ours.encode(text, add_special_tokens=False) for text in ("the naive", "résumé"))
    assert template.around(first, second).token_ids == pair.ids


@pytest.mark.parametrize("says", [None, True, False])
def test_gguf_gemma4_merges_stop_at_newlines(says: bool | None, tmp_path: Path) -> None:
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["a", "b", SPACE, "\n", f"{SPACE}a", f"{SPACE}ab", "\n\n", "é"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *bytes_of, *pieces]
    writer = GGUFWriter(tmp_path / "x.gguf", "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    kinds = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN, TokenType.CONTROL]
    writer.add_token_types([*kinds, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)])
    writer.add_token_merges([f"{SPACE} a", f"{SPACE}a b", "\n \n"])
    writer.add_bos_token_id(2)
    if says is not None:
        writer.add_add_bos_token(says)
    finish(writer)
    ours = Tokenizer.from_dir(tmp_path / "x.gguf")
    vocab = {token: index for index, token in enumerate(tokens)}
    expected = ["<bos>", "a", f"{SPACE}ab", "\n\n", "\n", "b", "é", "<0xC3>", "<0xA8>"]
    text = "a ab\n\n\nbéè"
    assert ours.encode(text) == [vocab[token] for token in expected]
    assert ours.decode(ours.encode(text)) == text
    assert ours.encode("<|turn>", add_special_tokens=False) == [4]


def test_gguf_tokenizer_key_not_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "x.gguf", gpt2(), "gpt-2", add_bos_token=False)
    with caplog.at_level("WARNING"):
        Tokenizer.from_dir(path)
    assert not caplog.text
    path = written(tmp_path / "x.gguf", gpt2(), "gpt-2", add_bos_token=False, add_sep_token=True)
    with caplog.at_level("WARNING"):
        Tokenizer.from_dir(path)
    assert "not read: add_sep_token" in caplog.text
