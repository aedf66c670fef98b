# SPDX-License-Identifier: Apache-2.0
"""Searches: one request with a row per beam, whose rows continue each other."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from quire.errors import ValidationError
from quire.sampling_params import BeamSearchParams
from quire.scheduler.output import TokenLogprobs
from quire.scheduler.request import RequestStatus
from tests.fixtures.folded import folded
from tests.scheduler.harness import VOCAB_SIZE, Engine, make_config

PROMPT = list(range(13))


class LotBeam:
    def __init__(self, token_ids: list[int], parent: int) -> None:
        self.token_ids, self.parent = token_ids, parent


class LotSearch:
    """Search that chooses its beams, and how many, by lot; `logprobs` is the seed."""

    begun: list[LotSearch] = []

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self.params, self.num_logprobs = params, 3
        self.heard: dict[tuple[int, ...], int] = {}  # tokens of a beam -> the token sampled after them
        self.begun.append(self)
        self.restart()

    def restart(self) -> None:
        self.draw = random.Random(self.params.logprobs)
        self.live, self.is_done = [LotBeam([], 0)], False

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        assert len(entries) == len(self.live)
        for beam, entry in zip(self.live, entries, strict=True):
            assert self.heard.setdefault(tuple(beam.token_ids), entry.token_ids[0]) == entry.token_ids[0]
        count = self.draw.choice([1, *[self.params.beam_width] * 4, self.params.beam_width - 1 or 1])
        parents = [self.draw.randrange(len(self.live)) for _ in range(count)]
        tokens = [[*self.live[parent].token_ids, self.draw.randrange(VOCAB_SIZE)] for parent in parents]
        self.live = [LotBeam(*pair) for pair in zip(tokens, parents, strict=True)]
        self.is_done = len(self.live[0].token_ids) == self.params.max_tokens


@pytest.fixture(autouse=True)
def lots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LotSearch]]:
    monkeypatch.setattr("quire.scheduler.beams.BEAM_SEARCH", f"{__name__}:LotSearch")
    LotSearch.begun = []
    yield LotSearch.begun
    LotSearch.begun = []


def search(engine: Engine, name: str, prompt: list[int], width: int, length: int, seed: int = 1) -> LotSearch:
    params = BeamSearchParams(width, length, logprobs=seed)
    engine.add(name, prompt, max_tokens=length, temperature=0, logprobs=3, search=params)
    return LotSearch.begun[-1]


@functools.cache
def alone(tokens: tuple[int, ...]) -> int:
    engine = Engine(make_config(num_gpu_blocks_override=20, max_num_batched_tokens=64))
    engine.add("r", tokens, max_tokens=1, temperature=0)
    engine.drain()
    return engine.tokens("r")[0]


KINDS = [("full",), ("full", "window 6"), ("full", "chunk 6"), ("state 2",)]


@folded("case", list(itertools.product(KINDS, [200, 28], range(2))))
def test_each_beam_is_as_if_it_were_alone(case: tuple[tuple[str, ...], int, int]) -> None:
    """The executor checks that every token reads those before it, whatever was shared, copied, dropped or computed."""
    kinds, num_blocks, seed = case
    draw = random.Random(repr(case))
    config = make_config(
        max_num_seqs=draw.choice([4, 8]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
        enable_prefix_caching=draw.random() < 0.5,
        scheduling_policy=draw.choice(["fcfs", "fair", "priority"]),
        num_gpu_blocks_override=num_blocks,
    )
    engine = Engine(config, len(kinds), kinds)
    prompts = [PROMPT[: 5 + 4 * number] for number in range(3)]
    searches = [
        search(engine, f"s{i}", prompt, draw.randint(1, 4), 9, seed + i) for i, prompt in enumerate(prompts)
    ]
    for number in range(4):
        engine.add(f"other{number}", PROMPT[: number + 1], max_tokens=30, seed=number)
    engine.drain()
    for prompt, one in zip(prompts, searches, strict=True):
        assert one.is_done
        assert {tokens: alone((*prompt, *tokens)) for tokens in one.heard} == one.heard


def test_a_beam_computes_one_token_and_is_copied_once() -> None:
    engine = Engine(make_config(enable_prefix_caching=False))
    one = search(engine, "s", PROMPT, 4, 12)
    engine.step()
    while not one.is_done:
        parents, start = [beam.parent for beam in one.live], len(PROMPT) + len(one.live[0].token_ids) - 1
        plan = engine.step()
        assert [each.start for each in plan.scheduled] == [start] * len(parents)
        is_at_border = start % engine.config.cache.block_size == 0
        copies = len(parents) - len(set(parents))
        assert len(plan.block_copies) in ((0,) if is_at_border else (copies, copies + 1))
        assert {each.request_id for each in plan.new_requests}.isdisjoint({"s"})
    engine.drain()


def test_a_search_starts_when_all_of_its_rows_are_free() -> None:
    engine = Engine(make_config(max_num_seqs=4))
    engine.add("first", PROMPT, max_tokens=3)
    search(engine, "s", PROMPT, 4, 5)
    engine.step()
    assert engine.requests["s"].status is RequestStatus.WAITING
    engine.add("later", [1])
    while not engine.requests["s"].is_finished:
        engine.step()
    assert engine.requests["first"].is_finished
    assert engine.requests["later"].status is RequestStatus.WAITING
    engine.drain()


def test_a_preempted_search_begins_again(lots: list[LotSearch]) -> None:
    engine = Engine(make_config(num_gpu_blocks_override=16, enable_prefix_caching=False))
    engine.add("big", range(20), max_tokens=30)
    one = search(engine, "s", list(range(8)), 3, 12)
    engine.drain()
    assert engine.last("s").num_preemptions > 0
    assert (one.is_done, len(lots)) == (True, 1)
    assert {tokens: alone((*range(8), *tokens)) for tokens in one.heard} == one.heard


@pytest.mark.parametrize("renew", ["forget", "mix"])
def test_a_search_begins_again_after_sleep_or_new_weights(renew: str) -> None:
    engine = Engine()
    one = search(engine, "s", PROMPT, 3, 8)
    for _ in range(4):
        engine.step()
    engine.scheduler.pause(engine.now)
    getattr(engine.scheduler, renew)(engine.now)
    engine.scheduler.check_integrity()
    assert engine.scheduler.kv.holders() == set()
    engine.scheduler.resume(engine.now)
    engine.drain()
    assert one.is_done
    assert {tokens: alone((*PROMPT, *tokens)) for tokens in one.heard} == one.heard


def test_an_aborted_or_failed_search_frees_all_rows() -> None:
    engine = Engine()
    for end in (lambda: engine.abort("s"), lambda: engine.fail("s")):
        search(engine, "s", PROMPT, 3, 20)
        for _ in range(4):
            engine.step()
        end()
        assert engine.requests["s"].is_finished
        engine.drain()


def test_a_search_that_cannot_run_is_refused() -> None:
    engine = Engine(make_config(max_num_seqs=4, num_gpu_blocks_override=20))
    with pytest.raises(ValidationError, match="5 beams runs them all at once, and max_num_seqs is 4"):
        search(engine, "wide", PROMPT, 5, 3)
    with pytest.raises(ValidationError, match=r"4 beams of up to 52 tokens .* may need 43 blocks"):
        search(engine, "long", PROMPT, 4, 40)
