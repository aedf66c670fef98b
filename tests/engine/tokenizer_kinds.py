# SPDX-License-Identifier: Apache-2.0
"""A small tokenizer of each kind that checkpoints bring, as a decoder sees them: none learned, none downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_files import BYTE_OF_CHAR

EOS = "</s>"
SPECIALS = ["<s>", EOS]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["a", "b", "the", "é", "日本", ".", "'s", "don", "n't", ",", "<0x", "4>"]
SPACED = ["▁", "▁▁", *PIECES, "▁a", "▁the", "▁日", "▁.", "a▁b"]


def _finished(model: models.Model, decoder: decoders.Decoder | None) -> Backend:
    backend = Backend(model)
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens([AddedToken("<tool>"), AddedToken("Ġù")])
    return backend


def _bpe(tokens: Iterable[str], decoder: decoders.Decoder | None, **options: object) -> Backend:
    vocab = {token: place for place, token in enumerate(tokens)}
    return _finished(models.BPE(vocab=vocab, merges=[], **options), decoder)


def byte_level() -> Backend:
    """GPT-2, Llama 3, Qwen: a token is any run of bytes; some are parts of two characters."""
    merged = ["Ġa", "Ġthe", "Ã©", "æĹ", "¥æ", "ľ¬", "ðŁĺ", "Ģa"]
    backend = _bpe([*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged], decoders.ByteLevel())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _with_spaces(backend: Backend, *, prepend: bool) -> Backend:
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    return backend


def llama_2() -> Backend:
    """SentencePiece's BPE with byte tokens; the space before the first word is dropped from the text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _with_spaces(
        _bpe([*BYTE_TOKENS, *SPACED], decoders.Sequence(steps), byte_fallback=True), prepend=True
    )


def gemma() -> Backend:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _with_spaces(
        _bpe([*BYTE_TOKENS, *SPACED], decoders.Sequence(steps), byte_fallback=True), prepend=False
    )


def _unigram(tokens: Iterable[str], decoder: decoders.Decoder, *, byte_fallback: bool) -> Backend:
    vocab = [("<unk>", -9.0), *((token, -float(place)) for place, token in enumerate(tokens))]
    return _finished(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback), decoder)


def unigram() -> Backend:
    """T5, XLM: no byte tokens."""
    backend = _unigram(SPACED, decoders.Metaspace(), byte_fallback=False)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def unigram_with_bytes() -> Backend:
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    backend = _unigram([*SPACED, *BYTE_TOKENS], decoder, byte_fallback=True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def wordpiece() -> Backend:
    """BERT: words are set apart unless they begin with ##, and punctuation is drawn up."""
    tokens = ["[UNK]", *PIECES, *(f"##{piece}" for piece in PIECES)]
    model = models.WordPiece({token: place for place, token in enumerate(tokens)}, unk_token="[UNK]")
    backend = _finished(model, decoders.WordPiece())
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def word_ends() -> Backend:
    """A space after a word is there only once another token follows."""
    return _bpe([*PIECES, *(f"{piece}</w>" for piece in PIECES)], decoders.BPEDecoder())


def ctc() -> Backend:
    """A token's text depends on the token before: repeated ones are one."""
    return _bpe(["<pad>", "|", *PIECES], decoders.CTC())


def greedy_strip() -> Backend:
    """The first tokens may all be trimmed away."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]
    return _bpe([*BYTE_TOKENS, *SPACED], decoders.Sequence(steps), byte_fallback=True)


def no_decoder() -> Backend:
    return _bpe(PIECES, None)


BUILDERS = (
    byte_level,
    llama_2,
    gemma,
    unigram,
    unigram_with_bytes,
    wordpiece,
    word_ends,
    ctc,
    greedy_strip,
    no_decoder,
)
KINDS: dict[str, Callable[[], Backend]] = {builder.__name__: builder for builder in BUILDERS}


class Kind:
    """A tokenizer with what tests need to know of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend = KINDS[name]()
        self.tokenizer = Tokenizer(self.backend, {"eos_token": EOS}, None)
        self.num_ids = self.backend.get_vocab_size()
        self.special_ids = {self.backend.token_to_id(token) for token in SPECIALS}
        self.byte_ids = self._byte_ids()
        pieces = set(range(self.num_ids)) - set(self.byte_ids) - self.special_ids
        self.whole_ids = sorted(i for i in pieces if "\ufffd" not in self.backend.decode([i]))

    def spell(self, text: str) -> list[int]:
        """The text as byte tokens."""
        return [self.byte_ids[byte] for byte in text.encode()]

    def _byte_ids(self) -> Sequence[int]:
        if self.name == "byte_level":
            return [
                self.backend.token_to_id(char) for char in sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)
            ]
        ids = [self.backend.token_to_id(token) for token in BYTE_TOKENS]
        return [] if None in ids else ids


def write_model_dir(kind: Kind, directory: Path) -> Path:
    """config.json and the tokenizer, for the null executor."""
    kind.backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": kind.num_ids,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": kind.backend.token_to_id(EOS),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
