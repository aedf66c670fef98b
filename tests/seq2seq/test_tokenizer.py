# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of SentencePiece models beside a vocabulary, against transformers' slow ones on random texts."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer
from quire.errors import ModelLoadError, ValidationError
from quire.seq2seq.pieces import PieceModel
from quire.seq2seq.tokenizer import PieceTokenizer
from tests.fixtures.folded import folded
from tests.seq2seq.tiny import greedy, save

sentencepiece = pytest.importorskip("sentencepiece", reason="it trains the models, and is the oracle")

LETTERS = {"source": "abcdeimnorst", "target": "äbdefghiklnorstuü"}
HARD = (
    "\ufb01",
    "Å",
    "A\u030a",
    "\uff21\uff11",
    "\u3300",
    "\u00a0",
    "\t",
    "\n",
    "\u200b",
    "\u2581",
    "🙂",
    "\u0e33",
)
SPECIAL = (">>fr<<", ">>xx<<", "</s>", "<unk>", "<pad>", "__de__", "__en__")
WORDS = st.text(alphabet=LETTERS["source"], min_size=1, max_size=9)
TEXTS = st.lists(
    WORDS | st.sampled_from(HARD) | st.text(max_size=4) | st.sampled_from(SPECIAL), max_size=12
).map(" ".join) | st.text(max_size=30)


def train(path: Path, letters: str, **options: Any) -> None:
    """Train a model on random words."""
    rng = random.Random(len(letters))
    words = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=8)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=(file := path.open("wb")),
        num_threads=1,
        minloglevel=2,
        **options,
    )
    file.close()


def pieces_of(path: Path) -> list[str]:
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(index) for index in range(3, model.get_piece_size())]


def save_marian(path: Path, *, apart: bool, **options: Any) -> None:
    """Write models of two languages, and vocabularies that lack some of their pieces."""
    for name, letters in LETTERS.items():
        train(path / f"{name}.spm", letters, vocab_size=120, **options)
    source, target = (pieces_of(path / f"{name}.spm") for name in LETTERS)
    first = ["</s>", "<unk>", ">>fr<<"]
    if apart:
        lists = [[*first, *source[::2]], [*first, *target[::-1]]]
    else:
        lists = [[*first, *dict.fromkeys([*source[::-1], *target[1::2]])]]
    for name, tokens in zip(("vocab.json", "target_vocab.json"), lists, strict=False):
        (path / name).write_text(json.dumps({token: index for index, token in enumerate([*tokens, "<pad>"])}))
    config = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": apart,
        "source_lang": "en",
        "target_lang": "de",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def save_m2m100(path: Path) -> None:
    train(path / "sentencepiece.bpe.model", LETTERS["source"], vocab_size=110, model_type="bpe")
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(path / "sentencepiece.bpe.model")[::-1]]
    (path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    config = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "de", "tgt_lang": "en"}
    listed = {"additional_special_tokens": [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]}
    (path / "tokenizer_config.json").write_text(json.dumps(config | listed))


SAVERS: dict[str, Any] = {
    "marian": lambda path: save_marian(path, apart=False),
    "marian-identity": lambda path: save_marian(path, apart=False, normalization_rule_name="identity"),
    "marian-bpe": lambda path: save_marian(path, apart=False, model_type="bpe"),
    "marian-apart": lambda path: save_marian(path, apart=True, remove_extra_whitespaces=False),
    "m2m100": save_m2m100,
}


@pytest.fixture(scope="module", params=list(SAVERS))
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Tokenizer, Path]:
    """The tokenizer of transformers and ours, of the same files."""
    import transformers

    path = tmp_path_factory.mktemp(request.param)
    SAVERS[request.param](path)
    kind = transformers.M2M100Tokenizer if request.param == "m2m100" else transformers.MarianTokenizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.from_pretrained(path), Tokenizer.from_dir(path), path


def check(theirs: list[int], ours: list[int], score: Any) -> None:
    """Compare ids; two segmentations of one score may differ."""
    if theirs != ours:
        assert score(theirs) == pytest.approx(score(ours), abs=1e-4), (theirs, ours)


def scores_of(name: str, path: Path, vocabulary: str) -> Any:
    """Return what adds up the scores of the pieces of ids."""

    def score(found: list[int]) -> float:
        ids = json.loads((path / vocabulary).read_text())
        of_id = {
            ids[piece.text]: piece.score for piece in PieceModel(path / name).pieces if piece.text in ids
        }
        return sum(of_id.get(token, -100.0) for token in found)

    return score


@given(text=TEXTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_ids_equal_those_of_the_slow_tokenizer(both: tuple[Any, Tokenizer, Path], text: str) -> None:
    theirs, ours, path = both
    assert isinstance(ours, PieceTokenizer)
    model = "source.spm" if (path / "source.spm").exists() else "sentencepiece.bpe.model"
    score = scores_of(model, path, "vocab.json")
    check(theirs(text)["input_ids"], ours.encode(text), score)
    check(
        theirs(text, add_special_tokens=False)["input_ids"],
        ours.encode(text, add_special_tokens=False),
        score,
    )


@given(text=st.text(alphabet=LETTERS["target"] + "  >ä", max_size=20))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_target_ids_and_texts_equal_the_slow_tokenizer(both: tuple[Any, Tokenizer, Path], text: str) -> None:
    theirs, ours, path = both
    is_apart = (path / "target_vocab.json").exists()
    model = "target.spm" if (path / "target.spm").exists() else "sentencepiece.bpe.model"
    wanted = theirs(text_target=text, add_special_tokens=False)["input_ids"]
    found = ours.encode_target(text)
    check(wanted, found, scores_of(model, path, "target_vocab.json" if is_apart else "vocab.json"))
    shown = [token for token in found if token != theirs.unk_token_id]
    assert ours.decode(shown).strip() == theirs.decode(shown, skip_special_tokens=True)


def test_texts_of_tokens_add_up(both: tuple[Any, Tokenizer, Path]) -> None:
    _, ours, _ = both
    ids = ours.encode_target("bist du der ist")
    place = ours.place_after([], skip_special_tokens=True)
    assert b"".join(map(place.advance, ids)).decode() == ours.decode(ids)


def test_plain_text_keeps_special_tokens_out(both: tuple[Any, Tokenizer, Path]) -> None:
    _, ours, _ = both
    end = ours.id_of("</s>")
    assert end in ours.encode("a </s> b", add_special_tokens=False)
    assert end not in ours.encode("a </s> b", add_special_tokens=False, allow_special=False)
    with pytest.raises(ValidationError, match="lone surrogate"):
        ours.encode("\ud800")


def test_engine_translates_texts_of_both_vocabularies(tmp_path: Path) -> None:
    model = save("marian-apart", tmp_path)
    save_marian(tmp_path, apart=True)
    vocabularies = [json.loads((tmp_path / name).read_text()) for name in ("vocab.json", "target_vocab.json")]
    for name, vocabulary, size in zip(
        ("vocab.json", "target_vocab.json"), vocabularies, (96, 80), strict=True
    ):
        kept = {token: index for token, index in vocabulary.items() if index < size - 1}
        (tmp_path / name).write_text(json.dumps({**kept, "<pad>": size - 1}))
    llm = LLM(str(tmp_path), dtype="float32")
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate(
        [{"prompt": "most decent", "decoder_prompt": "bist"}],
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        use_tqdm=False,
    )
    ids = tokenizer.encode("most decent")
    assert output.prompt_token_ids == ids
    wanted = greedy(model, ids, 6, [2, *tokenizer.encode_target("bist")])[0]
    assert list(output.outputs[0].token_ids) == wanted
    assert output.outputs[0].text.strip() == tokenizer.decode(wanted)
    llm.shutdown()


@folded(
    ("file", "content", "message"),
    [
        ("source.spm", b"", "SentencePiece model"),
        ("source.spm", b"\xff\xff\xff", "SentencePiece model"),
        ("source.spm", b"\x0a\x7f", "ends behind the file"),
        ("source.spm", b"\x0a\x02\x08\x01", "SentencePiece model"),
        ("vocab.json", b"[]", "JSON object"),
        ("vocab.json", b'{"a": "b"}', "tokens and their ids"),
        ("vocab.json", b'{"a": 1}', "no token"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    save_marian(tmp_path, apart=False)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_dir(tmp_path)
