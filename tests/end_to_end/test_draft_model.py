# SPDX-License-Identifier: Apache-2.0
"""A draft model shares blocks, prefixes, forks, preemption and random numbers with its target."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.spec_decode.speculation import Speculation
from quire.spec_decode.start import different_token
from tests.end_to_end.test_overlapped import STEM, Job, jobs_of_all_kinds, overlapped, serve
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE

FEW_BLOCKS = {"max_num_seqs": 8, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 24}
ENGINES: dict[str, dict[str, Any]] = {
    "preempted": FEW_BLOCKS,
    "swapped": {**FEW_BLOCKS, "swap_space": 0.01, "preemption_mode": "swap"},
    "eager": {"max_num_seqs": 4, "enforce_eager": True, "max_num_batched_tokens": 16},
}
SHAPES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.01, "logprobs": 2},
    {"top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    {"temperature": 1.5, "n": 2, "logit_bias": {5: 8.0, 7: -50.0}, "min_tokens": 4},
    {"allowed_token_ids": list(range(60, 90)), "prompt_logprobs": 1},
)


def drafting(model: Path | str, **keys: Any) -> dict[str, Any]:
    given = {"method": "draft_model", "model": str(model), "adaptive": False, "num_speculative_tokens": 4}
    return {"speculative_config": given | keys}


def jobs() -> list[Job]:
    """They end when they have all their tokens, so no guess stands behind the last one."""
    draw, made = random.Random(4), []
    for number in range(24):
        prompt = STEM[: draw.randrange(41)] + [
            draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 9))
        ]
        shape = {"seed": number, "max_tokens": draw.randrange(20, 45), "ignore_eos": True}
        made.append(Job(prompt, SamplingParams(**shape | SHAPES[number % len(SHAPES)])))
    return made


@pytest.mark.parametrize("engine", quick(ENGINES, ["preempted"]))
def test_self_drafting_is_always_accepted(
    engine: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """So its keys and values are those of the request's tokens, however the request came by its blocks."""
    model = tiny_model("llama-tied-bias")
    _, stats = serve(jobs(), model=str(model), max_model_len=96, **ENGINES[engine], **drafting(model))
    spec = stats["spec_decoding"]
    assert spec["num_accepted_tokens"] == spec["num_draft_tokens"] > 300
    assert stats.get("num_preemptions", 0) > 0 or engine == "eager"


@pytest.mark.parametrize("family", quick(["gemma3", "gpt2"], ["gemma3"]))
def test_draft_model_of_another_family_works(
    family: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """Their layers need other blocks, and share them all the same."""
    args: dict[str, Any] = {"model": str(tiny_model(family)), "max_model_len": 64, "max_num_seqs": 4}
    expected, _ = serve(jobs()[:12], **args)
    got, stats = serve(jobs()[:12], **args, **drafting(tiny_model("qwen2")))
    assert [output.outputs for output in got] == [output.outputs for output in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 100


def test_stops_and_aborts_leave_nothing_behind(
    tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """`serve` checks the blocks at its end."""
    model = tiny_model("llama-tied-bias")
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, **FEW_BLOCKS}
    _, stats = serve(jobs_of_all_kinds(), **args, **overlapped(2), **drafting(model))
    assert stats["spec_decoding"]["num_accepted_tokens"] > 100


def test_draft_model_works_with_adaptive_depth(
    tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    model = tiny_model("llama-tied-bias")
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, "max_num_seqs": 4}
    expected, _ = serve(jobs(), **args)
    got, _ = serve(jobs(), **args, **drafting(model, adaptive=True))
    assert [output.outputs for output in got] == [output.outputs for output in expected]


def changed(model: Path, to: Path, **config: Any) -> Path:
    """A copy whose config.json says something else."""
    shutil.copytree(model, to)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return to


def test_models_that_do_not_fit_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama-tied-bias")
    larger = changed(model, tmp_path / "larger", vocab_size=VOCAB_SIZE + 8)
    shorter = changed(model, tmp_path / "shorter", max_position_embeddings=64)
    renamed = changed(model, tmp_path / "renamed")
    words = json.loads((renamed / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (renamed / "tokenizer.json").write_text(json.dumps(words))
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "none": ({"speculative_config": {"method": "draft_model"}}, 'method "draft_model" needs a "model"'),
        "larger": (
            drafting(larger) | {"skip_tokenizer_init": True},
            f"its vocabulary has {VOCAB_SIZE + 8} tokens, and that of",
        ),
        "shorter": (drafting(shorter), "--max-model-len is 96, but the model was made for 64 positions"),
        "renamed": (drafting(renamed), "its tokenizer differs from that of .*: (token|id)"),
        "nowhere": (drafting(tmp_path / "nowhere"), "model '.*nowhere': there is no such directory"),
        "pooled": (drafting("quire-demo-embed"), "--max-model-len|pooling model"),
        "precision": (drafting(model, quantization="int3"), "--quantization"),
        "far": (drafting(model, num_speculative_tokens=65), "<= 64"),
    }
    for args, message in wrong.values():
        with pytest.raises(ConfigError, match=message):
            LLM(str(model), max_model_len=96, **args)


def padded(model: Path, to: Path, rows: int) -> Path:
    """A copy whose tables have another number of rows: fewer, or more whose logits are the largest."""
    changed(model, to, vocab_size=rows)
    tensors = load_file(to / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[:1] == (VOCAB_SIZE,):
            more = tensor.new_full((max(rows - VOCAB_SIZE, 0), *tensor.shape[1:]), 9.0)
            tensors[name] = torch.cat((tensor[:rows], more))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize("rows", [258, 259, 300])
@pytest.mark.parametrize("family", quick(["llama-tied-bias", "mamba"], ["llama-tied-bias"]))
def test_draft_model_with_other_padding_drafts_equal_tokens(
    family: str, rows: int, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    """Prompts hold tokens that the smaller tables lack."""
    model = tiny_model(family)
    args: dict[str, Any] = {"model": str(model), "max_model_len": 64, "max_num_seqs": 4}
    if family == "mamba":
        args["enable_prefix_caching"] = False
    expected, _ = serve(jobs()[:12], **args)
    got, stats = serve(jobs()[:12], **args, **drafting(padded(model, tmp_path / "draft", rows)))
    assert [output.outputs for output in got] == [output.outputs for output in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 50
    assert stats["spec_decoding"]["num_accepted_tokens"] > 20


TOKENS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5))


@given(own=TOKENS, other=TOKENS)
def test_different_token_of_agreeing_vocabularies_is_none(own: dict[str, int], other: dict[str, int]) -> None:
    own, other = ({token: i for i, token in {i: t for t, i in each.items()}.items()} for each in (own, other))
    contradicts = (
        any((a == b) != (i == j) for a, i in own.items() for b, j in other.items())
        or not own.keys() & other.keys()
    )
    assert (different_token(own, other) is not None) == contradicts


STATES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 40},
    "overlapped": {"max_num_seqs": 4, "max_num_batched_tokens": 24, **overlapped(2)},
}


@pytest.mark.parametrize("family", quick(["bamba", "mamba2", "mamba", "qwen3next"], ["bamba"]))
@pytest.mark.parametrize("engine", quick(STATES, ["chunks"]))
def test_self_drafting_with_states_is_accepted(
    engine: str, family: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """So states go back behind guesses, whatever was right of them, and no block is given back with one in it."""
    model = tiny_model(family)
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, "enable_prefix_caching": False}
    expected, _ = serve(jobs()[:7], **args, **STATES[engine])
    got, stats = serve(jobs()[:7], **args, **STATES[engine], **drafting(model))
    assert [output.outputs for output in got] == [output.outputs for output in expected]
    spec = stats["spec_decoding"]
    assert spec["num_accepted_tokens"] == spec["num_draft_tokens"] > 100


@pytest.mark.more
@pytest.mark.parametrize("engine", ["preempted", "swapped"])
def test_draft_model_with_states_serves_resumed_requests(
    engine: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """Resumed requests may draft from states a few tokens off, which costs acceptance and no correctness."""
    model = tiny_model("llama-tied-bias")
    args = {"model": str(model), "max_model_len": 96, **ENGINES[engine], "num_gpu_blocks_override": 24}
    expected, _ = serve(jobs(), **args)
    got, stats = serve(jobs(), **args, **drafting(tiny_model("bamba")))
    assert [output.outputs for output in got] == [output.outputs for output in expected]
    assert stats["spec_decoding"]["num_draft_tokens"] > 100
    assert stats["num_preemptions"] > 0


def test_draft_model_with_states_is_right_after_pauses(
    tiny_model: Callable[[str], Path], restore_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of steps without drafting are computed before the state blocks that precede them are freed."""
    asked = [0]

    def seldom(self: Speculation, known: dict[str, Any]) -> dict[str, list[int]]:
        asked[0] += 1
        return {} if asked[0] % 9 else propose(self, known)

    propose = Speculation.propose
    monkeypatch.setattr(Speculation, "propose", seldom)
    model = tiny_model("bamba")
    long = [
        Job(STEM[:20], SamplingParams(seed=number, max_tokens=70, ignore_eos=True)) for number in range(4)
    ]
    args: dict[str, Any] = {"model": str(model), "max_model_len": 96, "max_num_seqs": 4}
    _, stats = serve(long, **args, enable_prefix_caching=False, **drafting(model))
    spec = stats["spec_decoding"]
    assert spec["num_accepted_tokens"] == spec["num_draft_tokens"] > 20
