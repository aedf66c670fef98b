# SPDX-License-Identifier: Apache-2.0
"""The search itself, and what it sends."""

from __future__ import annotations

import random

import msgspec
import pytest

from quire.beam_search.requests import BeamSearches
from quire.beam_search.search import BeamSearch
from quire.engine.messages import AddRequest, CoreRequest, EngineCoreRequest
from quire.engine.prompt_forms import TokenizedPrompt
from quire.metrics.stats import IterationStats
from quire.outputs import RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.output import RequestUpdate, TokenLogprobs
from tests.fixtures.folded import folded

VOCAB_SIZE = 11


def entry_after(tokens: list[int]) -> TokenLogprobs:
    """A fixed random distribution, the same for the same tokens."""
    draw = random.Random(repr(tokens))
    logprobs = [-draw.expovariate(1.0) for _ in range(VOCAB_SIZE)]
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])
    numbers = [logprobs[token] for token in ranked]
    return TokenLogprobs([ranked[0], *ranked], [numbers[0], *numbers], 1)


def score(tokens: list[int], penalty: float, before: tuple[int, ...] = ()) -> float:
    entries = [entry_after([*before, *tokens[:place]]) for place in range(len(tokens))]
    logprobs = [dict(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)) for entry in entries]
    return sum(each[token] for each, token in zip(logprobs, tokens, strict=True)) / len(tokens) ** penalty


@folded("seed", range(20))
def test_search_as_wide_as_the_vocabulary_finds_the_best_two(seed: int) -> None:
    """And its scores are those of its tokens."""
    penalty = [0.0, 1.0, -0.5][seed % 3]
    params = BeamSearchParams(VOCAB_SIZE, 2, length_penalty=penalty, early_stopping="never")
    search = BeamSearch(params, [seed % VOCAB_SIZE])
    while not search.is_done:
        search.advance([entry_after([seed, *beam.token_ids]) for beam in search.live])
    eos = seed % VOCAB_SIZE
    found = [(one.beam.token_ids, one.score, one.reason) for one in search.best()]
    assert [s for _, s, _ in found] == sorted((s for _, s, _ in found), reverse=True)
    every = [[a, b] for a in range(VOCAB_SIZE) if a != eos for b in range(VOCAB_SIZE)]
    best = max(every, key=lambda tokens: score(tokens, penalty, (seed,)))
    longest = [tokens for tokens, _, _ in found if len(tokens) == 2]
    assert longest[0] == best
    for tokens, number, reason in found:
        assert number == pytest.approx(score(tokens, penalty, (seed,)))
        assert reason == ("stop" if tokens[-1] == eos else "length")


def over_the_wire(message: CoreRequest) -> CoreRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=CoreRequest)


def test_front_end_follows_the_beams_of_the_core() -> None:
    """As the core gets them, in a process of its own; after a preemption, and in another core, from the beginning."""
    outputs: list[RequestOutput | Exception] = []
    searches, stats = BeamSearches(None), IterationStats()
    plain = SamplingParams(temperature=0.0, max_tokens=6, logprobs=6)
    params = BeamSearchParams(3, 6, extra_args={"a": 1})
    first = EngineCoreRequest("r", [1, 2, 3], plain, 0.0, eos_token_ids=[0], search=params)
    core_ids, messages = searches.add(
        "label", TokenizedPrompt([1, 2, 3], None), first, params, outputs.append
    )
    (add,) = map(over_the_wire, messages)
    assert isinstance(add, AddRequest)
    assert (core_ids, add.requests()) == (["r"], [first])
    (again,) = searches.resume(["r"])
    assert again == first
    search = BeamSearch(params, [0])
    for step in range(10):
        if step == 3:
            search.restart()
        entries = [entry_after(beam.token_ids) for beam in search.live]
        search.advance(entries)
        update = RequestUpdate("r", [1] * len(entries), "stop" if search.is_done else None, logprobs=entries)
        update.scheduled_ts = 1.0 if step in (0, 3) or search.is_done else 0.0
        assert searches.process([update], 1.0, stats) == []
        if search.is_done:
            break
    (output,) = outputs
    assert isinstance(output, RequestOutput)
    assert [one.token_ids for one in output.outputs] == [one.beam.token_ids for one in search.best()]
    assert searches.num_unfinished == 0
    for one in output.outputs:
        assert one.cumulative_logprob == pytest.approx(score(one.token_ids, 0.0))


def test_a_search_that_fails_ends_alone() -> None:
    outputs: dict[str, list[RequestOutput | Exception]] = {"a": [], "b": []}
    searches = BeamSearches(None)
    for name, sink in outputs.items():
        first = EngineCoreRequest(name, [1], SamplingParams(temperature=0.0), 0.0)
        searches.add(name, TokenizedPrompt([1], None), first, BeamSearchParams(2, 5), sink.append)
    failed = RequestUpdate("a", [], "error", error="numbers went bad")
    assert searches.process([failed], 1.0, IterationStats()) == []
    (output,) = outputs["a"]
    assert isinstance(output, RequestOutput)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "numbers went bad")
    assert (outputs["b"], searches.num_unfinished) == ([], 2)
