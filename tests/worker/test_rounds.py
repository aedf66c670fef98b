# SPDX-License-Identifier: Apache-2.0
"""Further rounds change no token, end where something else is to be done, and leave to the next step the rest."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.kernels.cpu import library
from quire.worker.multi_step_decode import RecordedMultiStepDecode, StopTokens
from tests.fixtures.quick import quick_models
from tests.models.test_stages import EVERY_FAMILY
from tests.worker.harness import request

CHOSEN = {"llama", "gemma2", "mixtral", "gpt2", "jamba", "falconmamba", "qwen3next"}
NUM_TOKENS = 40
"""Of a tiny model's vocabulary, so many come in prompts and stops."""

pytestmark = pytest.mark.skipif(library.loaded() is None, reason=library.status())

Answer = tuple[list[int], str | None, int | str | None]


class Seen(NamedTuple):
    """Tokens of each request in further rounds of a step, and how many were allowed."""

    num_found: int
    num_allowed: int


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """All steps that might have gone on."""
    found: list[Seen] = []
    more = RecordedMultiStepDecode.more

    def noted(self: RecordedMultiStepDecode, *args: Any) -> Any:
        tokens = more(self, *args)
        found.append(Seen(len(tokens), args[3]))
        return tokens

    monkeypatch.setattr(RecordedMultiStepDecode, "more", noted)
    return found


def engine(model: Path, num_rounds: int, **args: Any) -> LLM:
    return LLM(
        str(model),
        **{
            "max_model_len": 64,
            "max_num_seqs": 8,
            "num_scheduler_steps": num_rounds,
            "max_multi_step_s": 1000.0,
            "block_size": 4,
            **args,
        },
    )


def params(kind: int, seed: int) -> SamplingParams:
    """Return the parameters of a kind of request, most of which multi-step decode supports."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 20},
        {"ignore_eos": True},
        {"temperature": 0.8, "min_p": 0.1, "n": 2},
        {"temperature": 1.0, "stop_token_ids": rng.sample(range(NUM_TOKENS), 12)},
        {"temperature": 0.7, "top_k": 1},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"min_tokens": 3},
        {"allowed_token_ids": rng.sample(range(NUM_TOKENS), 5)},
    ]
    return SamplingParams(
        **{"temperature": 0.0, "seed": seed, "max_tokens": rng.randint(1, 30)} | kinds[kind]
    )


def answers(llm: LLM, *, num_requests: int, num_kinds: int, at_once: bool) -> list[list[Answer]]:
    """Return the answers to requests of all kinds, together or one after the other."""
    rng = random.Random(5)
    prompts = [
        {"prompt_token_ids": [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 20))]}
        for _ in range(num_requests)
    ]
    asked = [params(i % num_kinds, i) for i in range(num_requests)]
    groups = [slice(None)] if at_once else [slice(i, i + 1) for i in range(num_requests)]
    outputs = [
        output for some in groups for output in llm.generate(prompts[some], asked[some], use_tqdm=False)
    ]
    return [[(list(c.token_ids), c.finish_reason, c.stop_reason) for c in one.outputs] for one in outputs]


@pytest.mark.parametrize("name", quick_models(sorted(EVERY_FAMILY), CHOSEN))
def test_no_token_depends_on_the_number_of_rounds(
    name: str, tiny_model: Callable[[str], Path], seen: list[Seen]
) -> None:
    model = tiny_model(name)
    sizes = {"num_requests": 11, "num_kinds": 7}
    expected = answers(engine(model, 1), **sizes, at_once=False)
    assert not seen
    for num_rounds, at_once in ((8, False), (3, True)):
        assert answers(engine(model, num_rounds), **sizes, at_once=at_once) == expected
        assert name not in CHOSEN or any(one.num_found for one in seen), "they were used"
        seen.clear()


@pytest.mark.parametrize(
    "args", [{}, {"num_gpu_blocks_override": 17}, {"quantization": "int8"}, {"max_num_seqs": 1}]
)
def test_rounds_are_used_unless_a_feature_excludes_them(
    args: dict[str, Any], tiny_model: Callable[[str], Path], seen: list[Seen]
) -> None:
    """Also where blocks are so few that requests are preempted, and where prefixes are found."""
    model, sizes = tiny_model("llama"), {"num_requests": 33, "num_kinds": 11}
    expected = answers(engine(model, 1, **args), **sizes, at_once=True)
    llm = engine(model, 8, **args)
    assert answers(llm, **sizes, at_once=True) == expected
    assert answers(llm, **sizes, at_once=False) == expected
    assert max(one.num_found for one in seen) == 7
    assert any(one.num_found == 0 for one in seen), "others ask for more than a draw"
    assert all(one.num_found <= one.num_allowed <= 7 for one in seen)


def test_a_run_ends_with_the_token_that_ends_a_request(
    tiny_model: Callable[[str], Path], seen: list[Seen]
) -> None:
    llm = engine(tiny_model("llama"), 8)
    prompt = {"prompt_token_ids": [1, 2, 3]}
    whole = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    tokens = list(whole[0].outputs[0].token_ids)
    seen.clear()
    last = next(place for place in range(3, 9) if tokens[place] not in tokens[:place])
    stopping = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[tokens[last]])
    (output,) = llm.generate([prompt], stopping)
    assert list(output.outputs[0].token_ids) == tokens[: last + 1]
    # The prompt's step gave the first, and each step one beside those of further rounds.
    assert 1 + sum(1 + one.num_found for one in seen) == last + 1


class FakeClock:
    """Seconds that each reading adds, the last one for ever."""

    def __init__(self, *steps: float) -> None:
        self._steps = list(steps)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        return self.now


@pytest.mark.parametrize(
    ("round_s", "expected"),
    [(2.0, 7), (2.5, 7), (2.6, 6), (5.0, 3), (9.9, 1), (10.1, 0), (30.0, 0)],
)
def test_rounds_end_within_their_time_by_the_worker_clock(
    round_s: float,
    expected: int,
    tiny_model: Callable[[str], Path],
    seen: list[Seen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 seconds for rounds of `round_s` each, the first of which is the step's own."""
    noted = RecordedMultiStepDecode.more

    def timed(self: RecordedMultiStepDecode, *args: Any) -> Any:
        self._clock, self._max_s = FakeClock(0.0, 0.0, round_s), 20.0
        return noted(self, *args[:4], round_s)

    monkeypatch.setattr(RecordedMultiStepDecode, "more", timed)
    llm = engine(tiny_model("llama"), 8)
    asked = SamplingParams(temperature=0.0, max_tokens=1 + 8, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], asked)
    assert seen[0] == (expected, 7)


def test_a_round_that_lasts_longer_than_expected_is_the_last(
    tiny_model: Callable[[str], Path], seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = RecordedMultiStepDecode.more

    def timed(self: RecordedMultiStepDecode, *args: Any) -> Any:
        self._clock, self._max_s = FakeClock(0.0, 0.0, 1.0, 1.0, 19.0, 1.0), 20.0
        return noted(self, *args[:4], 1.0)

    monkeypatch.setattr(RecordedMultiStepDecode, "more", timed)
    llm = engine(tiny_model("llama"), 8)
    llm.generate(
        [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    )
    assert seen[0] == (3, 7)


@pytest.mark.parametrize("together", [False, True])
def test_non_finite_logits_in_rounds_fail_only_their_request(
    together: bool, tiny_model: Callable[[str], Path], tmp_path: Path, seen: list[Seen]
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.safetensors")
    prompts = [{"prompt_token_ids": [i, 2, 3]} for i in (1, 4, 5)]
    asked = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    before = [list(o.outputs[0].token_ids) for o in engine(tmp_path, 8).generate(prompts, asked)]
    poison = next(token for token in before[0][5:] if token not in (*before[1], *before[2], *before[0][:5]))
    weights = load_file(file)
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    found = {}
    for num_rounds in (1, 8):
        llm = engine(tmp_path, num_rounds)
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        found[num_rounds] = [answer for some in groups for answer in ended(llm, some, asked)]
    assert found[8] == found[1]
    assert found[8] == [
        (before[0][: before[0].index(poison) + 1], "error"),
        *((t, "length") for t in before[1:]),
    ]


def ended(
    llm: LLM, prompts: list[dict[str, Any]], asked: SamplingParams
) -> list[tuple[list[int], str | None]]:
    """Return the tokens and finish reasons of requests, run until the engine is idle."""
    last: dict[str, Any] = {}
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, asked)
    while llm.llm_engine.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step()}
    return [(list(last[str(i)].token_ids), last[str(i)].finish_reason) for i in range(len(prompts))]


def test_stops_are_a_rows_own_and_its_next_owners_are_others() -> None:
    stops = StopTokens(4)
    stops.add_request(1, request([1], SamplingParams(stop_token_ids=[7, 8]), eos_token_ids=[2]))
    stops.add_request(2, request([1], SamplingParams(ignore_eos=True), eos_token_ids=[2]))
    rows = np.array([1, 2])

    def any_in(*tokens: int) -> bool:
        return bool((stops.of(rows) == np.array(tokens)[:, None]).any())

    assert any_in(7, 0)
    assert any_in(2, 0)
    assert not any_in(0, 2)
    assert not any_in(0, 7)
    stops.add_request(1, request([1], SamplingParams(), eos_token_ids=[3]))
    assert not any_in(7, 0)
    assert any_in(3, 0)
