# SPDX-License-Identifier: Apache-2.0
"""Added and special tokens beside tokenizer.json: where transformers reads them, and with its results."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quire.engine.tokenizer import Tokenizer
from quire.errors import ModelLoadError
from tests.fixtures.folded import folded

START, END, TOOL, IMAGE, PAD = "<|im_start|>", "<|im_end|>", "<Tool>", "<image>", "[PAD]"
IN_VOCABULARY = "<s>"
"""A token of the model's own vocabulary, which tokenizer.json does not list as an added one."""
FIRST_FREE = 258
TOKENS = (START, END, TOOL, IMAGE)
TEXTS = (
    f"a {START} b{END}  {TOOL} c {IMAGE}d{PAD}",
    f"{TOOL}{IN_VOCABULARY}</s> x",
    f"a<tool>{END}{END} <TOOL> word{TOOL}word {IMAGE} ",
)
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
flags = st.fixed_dictionaries(
    {},
    optional={name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "special", "normalized")},
)


def write_backend(directory: Path, added: list[AddedToken], *, lowercase: bool = False) -> None:
    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab | {IN_VOCABULARY: 256, "</s>": 257}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.add_tokens([AddedToken("</s>", special=True), *added])
    backend.save(str(directory / "tokenizer.json"))


def write(directory: Path, name: str, values: object) -> None:
    (directory / name).write_text(json.dumps(values))


def assert_same(directory: Path) -> None:
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(directory), Tokenizer.from_dir(directory)
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.named_tokens == theirs.special_tokens_map
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


content = st.sampled_from((START, END, TOOL, IN_VOCABULARY, "</s>", PAD))


@st.composite
def places(draw: st.DrawFn, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw named and extra tokens for tokenizer_config.json and for special_tokens_map.json."""
    config: dict[str, Any] = {"image_token": IMAGE} if draw(st.booleans()) else {}
    mapped: dict[str, Any] = {}
    for name in NAMES:
        for place, mark in ((config, {"__type": "AddedToken"}), (mapped, {})):
            form = draw(st.sampled_from(("text", "object", "none", "null")))
            if form == "null":
                place[name] = None
            elif form == "text" or kind == "added":
                # transformers 5 forgets beside added_tokens.json that a token in the form of an object is special
                place[name] = draw(content)
            elif form == "object":
                own = {key: value for key, value in draw(flags).items() if key != "special"}
                place[name] = {"content": draw(content), **mark, **own}
    for place in (config, mapped):
        key = draw(st.sampled_from(("extra_special_tokens", "additional_special_tokens", "none")))
        if key != "none":
            place[key] = draw(st.lists(content, max_size=3, unique=True))
    if "additional_special_tokens" not in config and draw(st.booleans()):
        config["extra_special_tokens"] = {"boi": IMAGE}
    if kind == "added":
        mapped.pop("additional_special_tokens", None)  # transformers 5 forgets these there, and 4 did not
    return config, mapped


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """Draw which of the files has which token, and in which form."""
    count = draw(st.integers(0, len(TOKENS)))
    inside = draw(st.integers(0, count))
    entries = [{"content": token, **draw(flags)} for token in TOKENS[:count]]
    kind = draw(st.sampled_from(("decoder", "added", "none")))
    config, mapped = draw(places(kind))
    files: dict[str, Any] = {"tokenizer_config.json": config}
    listed = {str(FIRST_FREE + index): entry for index, entry in enumerate(entries)}
    if kind == "decoder":
        config["added_tokens_decoder"] = listed
    elif kind == "added":
        files["added_tokens.json"] = {entry["content"]: int(index) for index, entry in listed.items()}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = mapped
    return {"files": files, "added": entries[:inside], "lowercase": draw(st.booleans())}


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(checkpoints())
def test_tokens_in_any_file_are_those_of_transformers(case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        added = [AddedToken(**entry) for entry in case["added"]]
        write_backend(directory, added, lowercase=case["lowercase"])
        for file, values in case["files"].items():
            write(directory, file, values)
        assert_same(directory)


@pytest.mark.parametrize("place", ["added_tokens.json", "added_tokens_decoder"])
def test_tokens_of_a_slow_save_are_tokens(place: str, tmp_path: Path) -> None:
    write_backend(tmp_path, [])
    config: dict[str, Any] = {"eos_token": END}
    if place == "added_tokens.json":
        write(tmp_path, place, {START: 258, END: 259})
    else:
        config[place] = {"258": {"content": START}, "259": {"content": END, "special": True}}
    write(tmp_path, "tokenizer_config.json", config)
    ours = Tokenizer.from_dir(tmp_path)
    assert ours.encode(START) == [258]
    assert ours.eos_token_id == 259
    assert_same(tmp_path)


def test_special_tokens_map_gives_missing_names(tmp_path: Path) -> None:
    write_backend(tmp_path, [AddedToken(END, special=True)])
    write(tmp_path, "tokenizer_config.json", {"chat_template": "{{ bos_token }}"})
    write(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": END})
    ours = Tokenizer.from_dir(tmp_path)
    assert (ours.bos_token, ours.eos_token, ours.eos_token_id) == ("<s>", END, 258)
    assert_same(tmp_path)


CONTRADICTIONS: dict[str, tuple[dict[str, int], str]] = {
    "id of another": ({START: 3}, r"gives '<\|im_start\|>' the id 3, which is that of '.' in tokenizer.json"),
    "token of another": ({"</s>": 258}, "gives '</s>' the id 258; tokenizer.json gives it 257"),
    "gap": ({START: 260}, "the id 260, and 258 is the next free one"),
    "twice": ({START: 258, END: 258}, "both have the id 258"),
    "negative": ({START: -1}, r"must be an integer in \[0"),
}


@folded("place", ["added_tokens.json", "added_tokens_decoder"])
@folded("name", CONTRADICTIONS)
def test_contradicting_ids_are_refused(name: str, place: str, tmp_path: Path) -> None:
    tokens, problem = CONTRADICTIONS[name]
    write_backend(tmp_path, [])
    if place == "added_tokens.json":
        write(tmp_path, place, tokens)
    elif name in ("twice", "negative"):
        return  # keys of an object are not twice there, and are checked elsewhere
    else:
        config = {place: {str(index): {"content": token} for token, index in tokens.items()}}
        write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.from_dir(tmp_path)


@folded(
    ("config", "problem"),
    [
        ({"added_tokens_decoder": {"x": {"content": START}}}, "the key 'x' must be a token id"),
        ({"added_tokens_decoder": {"258": 3}}, "258 must be a string, or an object with content"),
        ({"added_tokens_decoder": {"258": {"content": START, "lstrip": 1}}}, "lstrip must be true or false"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be a JSON object"),
        ({"eos_token": 3}, "eos_token must be a string, or an object with content"),
        ({"extra_special_tokens": "x"}, "extra_special_tokens must be a list of tokens"),
        ({"additional_special_tokens": [3]}, "0 must be a string, or an object"),
    ],
)
def test_malformed_tokens_are_refused(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write_backend(tmp_path, [])
    write(tmp_path, "tokenizer_config.json", config)
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.from_dir(tmp_path)
