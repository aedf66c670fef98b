# SPDX-License-Identifier: Apache-2.0
"""Beam search: as Transformers does it, and whatever is shared, preempted or computed again, bit for bit the same."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.beam_search.search import BeamSearch
from quire.engine.llm_engine import LLMEngine
from quire.engine.trace import read_trace, replay
from quire.entrypoints.llm import LLM
from quire.errors import ValidationError
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.output import TokenLogprobs
from tests.end_to_end.test_overlapped import overlapped
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import VOCAB_SIZE

MODEL = "llama-tied-bias"
LENGTHS = (1, 4, 17, 16, 33)
TIGHT = {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_gpu_blocks_override": 14, "block_size": 8}


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def make_llm(model_dir: Path, **args: Any) -> LLM:
    return LLM(str(model_dir), **{"max_model_len": 96, "dtype": "float32", "cpu_threads": 1} | args)


def transformers_search(
    model_dir: Path, prompt: list[int], eos: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """The generated tokens of each sequence, without padding, and its score."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=0,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos,
        pad_token_id=VOCAB_SIZE - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    cut = [_cut(row[len(prompt) :], eos) for row in found.sequences.tolist()]
    return list(zip(cut, found.sequences_scores.tolist(), strict=True))


def _cut(tokens: list[int], eos: list[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in eos), len(tokens) - 1)
    return tokens[: end + 1]


def facts(outputs: list[BeamSearchOutput]) -> list[Any]:
    return [
        [(one.tokens, one.cum_logprob, one.logprobs, one.finish_reason) for one in o.sequences]
        for o in outputs
    ]


more = pytest.mark.more
CASES = [
    (MODEL, 3, 1.0, True),
    ("gemma3", 4, 2.0, "never"),
    ("qwen2-window", 2, 0.0, False),
    *[pytest.param(family, 3, 1.5, False, marks=more) for family in (MODEL, "gemma3", "qwen2-window")],
    *[pytest.param(family, 5, -1.0, False, marks=more) for family in (MODEL, "gemma3", "qwen2-window")],
    *[pytest.param(MODEL, 6, 0.7, early, marks=more) for early in (True, False, "never")],
]


@pytest.mark.parametrize(("family", "width", "penalty", "early"), CASES)
def test_equals_transformers(
    family: str, width: int, penalty: float, early: bool | str, tiny_model: Callable[[str], Path]
) -> None:
    """The end tokens are ones that the model likes, so that sequences end at all lengths."""
    model_dir = tiny_model(family)
    params = BeamSearchParams(width, 10, length_penalty=penalty, early_stopping=early)
    liked = make_llm(model_dir).beam_search(prompts(), BeamSearchParams(2, 10, ignore_eos=True))
    eos = sorted({one.sequences[1].tokens[-4] for one in liked[:2]})
    llm = make_llm(
        model_dir, hf_overrides={"eos_token_id": eos}, override_generation_config={"eos_token_id": eos}
    )
    eos = llm.llm_engine.input_processor.tokenizers.model.end_ids  # the tokenizer has one, too
    outputs = llm.beam_search(prompts(), params)
    for prompt, output in zip(prompts(), outputs, strict=True):
        expected = transformers_search(model_dir, prompt, eos, params)
        found = [one.tokens[len(prompt) :] for one in output.sequences]
        assert found == [tokens for tokens, _ in expected]
        scores = [one.cum_logprob / (len(one.tokens) - len(prompt)) ** penalty for one in output.sequences]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-4)


@functools.cache
def all_resubmitted(model_dir: Path, params: BeamSearchParams) -> list[list[tuple[list[int], float]]]:
    llm = make_llm(model_dir, max_logprobs=100)
    return [resubmitted(llm, prompt, params) for prompt in prompts()]


def resubmitted(llm: LLM, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """The slow way: each beam of each step is a new prompt, which is computed, or found in the prefix cache."""
    search = BeamSearch(params, llm.llm_engine.input_processor.tokenizers.model.end_ids)
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=search.num_candidates)
    while not search.is_done:
        outputs = llm.generate([prompt + beam.token_ids for beam in search.live], one_token, use_tqdm=False)
        search.advance([_entry(output) for output in outputs])
    return [(one.beam.token_ids, one.beam.logprob) for one in search.best()]


def _entry(output: RequestOutput) -> TokenLogprobs:
    assert output.outputs[0].logprobs is not None
    ranked = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: item[1].rank or 0)
    ids, logprobs = [token for token, _ in ranked], [one.logprob for _, one in ranked]
    return TokenLogprobs([ids[0], *ids], [logprobs[0], *logprobs], 1)


POOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "uncached": {"enable_prefix_caching": False},
    "tight": TIGHT,
    "tight-uncached": TIGHT | {"enable_prefix_caching": False, "scheduling_policy": "fair"},
    "tight-overlapped": TIGHT | overlapped(3),
    "tight-swap": TIGHT | {"preemption_mode": "swap", "swap_space": 0.001},
}


@pytest.mark.parametrize("family", [MODEL, pytest.param("gemma3", marks=more)])
@pytest.mark.parametrize("pool", quick(POOLS, ["plain", "tight-uncached", "tight-swap"]))
def test_shared_blocks_change_nothing(family: str, pool: str, tiny_model: Callable[[str], Path]) -> None:
    """All prompts at once, beside requests that sample; the integrity of the cache is checked after every step."""
    args = POOLS[pool]
    if family == "gemma3" and "num_gpu_blocks_override" in args:
        args = args | {"num_gpu_blocks_override": 40}
    params = BeamSearchParams(3, 14, length_penalty=0.8)
    expected = all_resubmitted(tiny_model(family), params)
    llm = make_llm(tiny_model(family), **args)
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts()):
        engine.add_request(f"beam{number}", prompt, params)
        engine.add_request(f"plain{number}", prompt[:9], SamplingParams(seed=number, max_tokens=60, n=2))
    last = drained(engine)
    for number, sequences in enumerate(expected):
        found = last[f"beam{number}"].outputs
        assert [(one.token_ids, one.cumulative_logprob) for one in found] == sequences
    alone = llm.generate(prompts()[1][:9], SamplingParams(seed=1, max_tokens=60, n=2), use_tqdm=False)
    assert alone[0].outputs == last["plain1"].outputs
    if "num_gpu_blocks_override" in args and family == MODEL:
        assert engine.call_core("stats").get("num_preemptions", 0) > 0


def drained(engine: LLMEngine) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.call_core("check_integrity")
    engine.step()
    assert engine.call_core("stats").get("kv_cache_usage", 0.0) == 0.0
    return last


def test_beams_share_their_blocks(tiny_model: Callable[[str], Path]) -> None:
    """A wide search of a long prompt fits where its beams side by side would not, and computes little twice."""
    prompt = [3 + i % 50 for i in range(64)]
    args = {
        "num_gpu_blocks_override": 19,
        "block_size": 8,
        "max_model_len": 80,
        "enable_prefix_caching": False,
    }
    llm = make_llm(tiny_model(MODEL), **args)
    (output,) = llm.beam_search(prompt, BeamSearchParams(4, 8))
    stats = llm.llm_engine.call_core("stats")
    assert (len(output.sequences), stats.get("num_preemptions", 0)) == (4, 0)


def test_a_search_runs_until_its_end(tiny_model: Callable[[str], Path]) -> None:
    """Requests queued later wait for the whole beam search, as they would for any other request."""
    engine = make_llm(tiny_model(MODEL), max_num_seqs=2, scheduling_policy="fcfs").llm_engine
    engine.add_request("beam", prompts()[2], BeamSearchParams(2, 20, ignore_eos=True))
    for number in range(4):
        engine.add_request(f"later{number}", prompts()[1], SamplingParams(temperature=0, max_tokens=40))
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended[0] == "beam"


def test_a_recorded_search_is_replayed(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "run"
    llm = make_llm(tiny_model(MODEL), record_trace=str(path), **TIGHT)
    llm.beam_search(prompts(), BeamSearchParams(3, 9))
    llm.shutdown()
    assert sum(1 for _ in replay(read_trace(path))) > 30


def test_aborted_search_returns_its_beams_and_leaks_nothing(
    tiny_model: Callable[[str], Path],
) -> None:
    engine = make_llm(tiny_model(MODEL)).llm_engine
    engine.add_request("beam", prompts()[2], BeamSearchParams(3, 50, ignore_eos=True))
    for _ in range(7):
        assert engine.step() == []
    engine.abort_request("beam")
    (output,) = engine.step()
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 3
    assert {len(one.token_ids) for one in output.outputs} == {7}
    drained(engine)


def test_a_search_goes_on_in_another_core(tiny_model: Callable[[str], Path]) -> None:
    """It begins again in the new core, with the same result."""
    params = BeamSearchParams(3, 12, ignore_eos=True)
    llm = make_llm(tiny_model(MODEL), max_num_seqs=3)
    (expected,) = llm.beam_search(prompts()[3], params)
    engine, other = llm.llm_engine, make_llm(tiny_model(MODEL), max_num_seqs=3).llm_engine
    engine.add_request("beam", prompts()[3], params)
    for _ in range(6):
        engine.step()
    engine._clients = other._clients
    engine._send(engine._front_end.unfinished(0))
    found = drained(engine)["beam"]
    assert [prompts()[3] + one.token_ids for one in found.outputs] == [
        one.tokens for one in expected.sequences
    ]
    assert [one.cumulative_logprob for one in found.outputs] == [
        one.cum_logprob for one in expected.sequences
    ]


def test_unsupported_beam_search_parameters_are_refused(tiny_model: Callable[[str], Path]) -> None:
    for bad in ({"temperature": 1.0}, {"beam_width": 0}, {"early_stopping": "soon"}, {"max_tokens": 0}):
        with pytest.raises(ValidationError):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3} | bad)
    llm = make_llm(tiny_model(MODEL), logprobs_mode="raw_logits")
    with pytest.raises(ValidationError, match="adds up logprobs"):
        llm.beam_search([[3]], BeamSearchParams(2, 3))
    engine = make_llm(
        tiny_model(MODEL), max_num_seqs=2, max_model_len=40, num_gpu_blocks_override=6
    ).llm_engine
    for wide, why in (
        (BeamSearchParams(3, 3), "3 beams runs them all"),
        (BeamSearchParams(2, 32), "may need"),
    ):
        engine.add_request("wide", [3] * 4, wide)
        (output,) = drained(engine).values()
        assert why in str(output.outputs[0].stop_reason)


def test_text_is_that_of_the_tokens() -> None:
    llm = LLM(max_model_len=128)
    (output,) = llm.beam_search("What is the capital of", BeamSearchParams(2, 8), use_tqdm=False)
    for one in output.sequences:
        assert one.text is not None
        assert one.text.startswith("What is the capital of")
        assert sum(next(iter(p.values())).logprob for p in one.logprobs) == pytest.approx(one.cum_logprob)
