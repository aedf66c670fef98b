"""A model that guesses: it shares blocks, prefixes, forks and preemption with the one it guesses for, and its noise."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.draft_model import fingerprint
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError, StartupError
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
def test_who_guesses_for_himself_is_always_right(
    engine: str, tiny_model: Callable[[str], Path], restore_threads: None
) -> None:
    """So its keys and values are those of the request's tokens, however the request came by its blocks."""
    model = tiny_model("llama-tied-bias")
    _, stats = serve(jobs(), model=str(model), max_model_len=96, **ENGINES[engine], **drafting(model))
    spec = stats["spec_decoding"]
    assert spec["num_accepted_tokens"] == spec["num_draft_tokens"] > 300
    assert stats.get("num_preemptions", 0) > 0 or engine == "eager"


@pytest.mark.parametrize("family", quick(["gemma3", "gpt2"], ["gemma3"]))
def test_a_model_of_another_family_guesses(
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


def test_who_adapts_guesses_too(tiny_model: Callable[[str], Path], restore_threads: None) -> None:
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
    assert fingerprint(Tokenizer.from_dir(renamed)) != fingerprint(Tokenizer.from_dir(model))
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "none": ({"speculative_config": {"method": "draft_model"}}, 'method "draft_model" needs a "model"'),
        "larger": (drafting(larger), f"its vocabulary has {VOCAB_SIZE + 8} tokens, and that of"),
        "shorter": (drafting(shorter), "--max-model-len is 96, but the model was made for 64 positions"),
        "renamed": (drafting(renamed), "other tokens have the same ids"),
        "nowhere": (drafting(tmp_path / "nowhere"), "model '.*nowhere': .* is no directory"),
        "pooled": (drafting("quire-demo-embed"), "--max-model-len|pooled"),
        "precision": (drafting(model, quantization="int3"), "--quantization"),
        "far": (drafting(model, num_speculative_tokens=65), "<= 64"),
    }
    for given, message in wrong.values():
        with pytest.raises(ConfigError, match=message):
            LLM(str(model), max_model_len=96, **given)


def test_layers_with_states_do_not_guess(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StartupError, match=r"layers of .*bamba.* keep a state, which does not go back"):
        LLM(str(tiny_model("llama-tied-bias")), max_model_len=96, **drafting(tiny_model("bamba")))
