# SPDX-License-Identifier: Apache-2.0
"""Draft heads: their drafts follow the formulas of their papers and change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import ConfigError, StartupError
from quire.sampling_params import SamplingParams
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text
from quire.spec_decode.worker.proposer import ModelProposer
from tests.end_to_end.test_draft_model import FEW_BLOCKS
from tests.end_to_end.test_overlapped import STEM, Job, jobs_of_all_kinds, overlapped, serve
from tests.fixtures.draft_heads import HEADS, MTP, MTPOracle, Target, write_mtp
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of

MODEL = "llama-tied-bias"
NUM_GUESSES = 4


def guessing(heads: Path, method: str, **keys: Any) -> dict[str, Any]:
    given = {"method": method, "model": str(heads), "adaptive": False, "num_speculative_tokens": NUM_GUESSES}
    return {"speculative_config": given | keys}


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The texts that were guessed for, and what was guessed."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = ModelProposer.propose

    def spied(self: ModelProposer, texts: Sequence[Text], most: int) -> list[Draft]:
        known = [text.token_ids.tolist() for text in texts]
        drafts = propose(self, texts, most)
        seen.extend((ids, draft.token_ids) for ids, draft in zip(known, drafts, strict=True))
        return drafts

    monkeypatch.setattr(ModelProposer, "propose", spied)
    return seen


def generate(model: Path, **args: Any) -> None:
    """The likeliest texts, in small steps."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = [Job([*STEM[: 5 * number], 7 + number], greedy) for number in range(6)]
    small = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    serve(texts, model=str(model), **small, enable_prefix_caching=False, **args)


@pytest.mark.parametrize("name", quick(HEADS, ["medusa", "eagle", "eagle3", "eagle3-without-head"]))
def test_drafts_are_those_of_the_formulas(
    name: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    proposed: list[tuple[list[int], list[int]]],
    restore_threads: None,
) -> None:
    """Whatever chunks prompts come in, and however many guesses were wrong before; the first 12 tokens of each text."""
    heads, model = HEADS[name], tiny_model(MODEL)
    directory = heads.write(tmp_path / "heads")
    generate(model, **guessing(directory, heads.method))
    target, tensors = Target(oracle_of(model)), heads.tensors(directory)
    assert sum(len(found) >= 3 for _, found in proposed) > 40
    for ids, found in proposed:
        assert found == heads.guesses(target, tensors, ids, NUM_GUESSES)[: len(found)]


def test_states_of_steps_without_drafts_are_not_lost(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    proposed: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    restore_threads: None,
) -> None:
    """Forty tokens are generated between questions, which is more than are kept."""
    heads, model, propose = HEADS["eagle"], tiny_model(MODEL), ModelProposer.propose

    def seldom(self: ModelProposer, texts: Sequence[Text], most: int) -> list[Draft]:
        due = [len(text.token_ids) % 40 == 0 for text in texts]
        drafts = iter(propose(self, list(compress(texts, due)), most) if any(due) else ())
        return [next(drafts) if is_due else NO_DRAFT for is_due in due]

    monkeypatch.setattr(ModelProposer, "propose", seldom)
    directory = heads.write(tmp_path / "heads")
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    texts = [Job(STEM[:number], params) for number in (5, 12, 31)]
    serve(texts, model=str(model), max_model_len=128, **guessing(directory, "eagle"))
    target, tensors = Target(oracle_of(model)), heads.tensors(directory)
    assert sorted(len(ids) for ids, _ in proposed) == [*[40] * 3, *[80] * 3, 120]
    assert all(len(found) == NUM_GUESSES for _, found in proposed)
    for ids, found in proposed:
        assert found == heads.guesses(target, tensors, ids, NUM_GUESSES)


@pytest.mark.parametrize("family", quick(MTP, ["deepseekv3"]))
def test_mtp_layer_drafts_as_the_formula(
    family: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    proposed: list[tuple[list[int], list[int]]],
    restore_threads: None,
) -> None:
    model = write_mtp(family, tiny_model(family), tmp_path / "model")
    keys = {"method": "mtp", "adaptive": False, "num_speculative_tokens": NUM_GUESSES}
    generate(model, speculative_config=keys)
    oracle = MTPOracle(family, oracle_of(tiny_model(family)), model)
    assert sum(len(found) >= 3 for _, found in proposed) > 40
    for ids, found in proposed:
        assert found == oracle.guesses(ids, NUM_GUESSES)[: len(found)]


@pytest.mark.more
@pytest.mark.parametrize("name", quick(["medusa", "eagle3"], ["eagle3"]))
def test_stops_and_aborts_leave_nothing_behind(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path, restore_threads: None
) -> None:
    """In the overlapped loop; `serve` checks the blocks at its end."""
    directory = HEADS[name].write(tmp_path / "heads")
    args: dict[str, Any] = {"model": str(tiny_model(MODEL)), "max_model_len": 96, **FEW_BLOCKS}
    expected, _ = serve(jobs_of_all_kinds(), **args)
    got, stats = serve(
        jobs_of_all_kinds(), **args, **overlapped(2), **guessing(directory, HEADS[name].method)
    )
    whole = [number for number, job in enumerate(jobs_of_all_kinds()) if job.abort_after is None]
    assert [got[number].outputs for number in whole] == [expected[number].outputs for number in whole]
    assert stats["spec_decoding"]["num_draft_tokens"] > 100


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "medusa of another size": (
        "medusa-named",
        {"hidden_size": 32},
        "hidden_size is 32, but the target's is 64",
    ),
    "medusa of other tokens": (
        "medusa-named",
        {"vocab_size": 32},
        f"vocab_size is 32, but the target's is {VOCAB_SIZE}",
    ),
    "medusa's fewer tokens": ("medusa-named", {"truncated_vocab_size": 32}, "truncated_vocab_size = 32"),
    "eagle of another size": ("eagle", {"hidden_size": 32}, "hidden_size is 32, but the target's is 64"),
    "eagle of other tokens": (
        "eagle3",
        {"vocab_size": 32000},
        f"vocab_size is 32000, but the target's is {VOCAB_SIZE}",
    ),
    "eagle of more tokens than it says": ("eagle3", {"vocab_size": 32}, "draft_vocab_size must be"),
    "eagle of another model": (
        "eagle3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 30]}},
        r"layers \[1, 2, 30\] are read, but the target has 3 layers",
    ),
    "medusa's more heads": ("medusa", {"medusa_num_heads": 4}, "tensor '3.0.linear.weight' is in none"),
}


def test_offsets_outside_of_the_vocabulary_are_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = HEADS["eagle3"].write(tmp_path / "heads")
    tensors = load_file(directory / "model.safetensors")
    tensors["d2t"][-1] = VOCAB_SIZE
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(StartupError, match="'d2t' has token ids outside"):
        LLM(str(tiny_model(MODEL)), max_model_len=64, **guessing(directory, "eagle3"))


@pytest.mark.parametrize("case", WRONG)
def test_heads_that_do_not_fit_are_refused(
    case: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    name, config, message = WRONG[case]
    directory = HEADS[name].write(tmp_path / "heads", **config)
    with pytest.raises(StartupError, match=message):
        LLM(str(tiny_model(MODEL)), max_model_len=96, **guessing(directory, HEADS[name].method))


def test_a_model_is_no_heads(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model(MODEL)
    with pytest.raises(ConfigError, match="not Medusa heads"):
        LLM(str(model), max_model_len=96, **guessing(model, "medusa"))
    with pytest.raises(StartupError, match=r"tensor 'model.embed_tokens\.weight' has no place in Eagle3Head"):
        LLM(str(model), max_model_len=96, **guessing(model, "eagle3"))
    with pytest.raises(ConfigError, match="has no num_nextn_predict_layers: the model has no MTP layer"):
        LLM(str(model), max_model_len=96, speculative_config={"method": "mtp"})
    with pytest.raises(ConfigError, match='method "medusa" needs a "model"'):
        LLM(str(model), max_model_len=96, speculative_config={"method": "medusa"})


def test_the_documented_lines_convert_heads_that_are_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = HEADS["eagle"]
    tensors = heads.tensors(heads.write(tmp_path / "heads"))
    page = (Path(__file__).parents[2] / "docs" / "speculative.md").read_text()
    lines = page.split("### Heads that are published as pickles")[1].split("```py\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "heads")
    Path(heads.file).unlink()
    torch.save(tensors, "pytorch_model.bin")
    exec(lines, {})  # noqa: S102
    converted = heads.tensors(tmp_path / "heads")
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
