# SPDX-License-Identifier: Apache-2.0
"""The search itself, and what it sends."""

from __future__ import annotations

import random

import msgspec
import pytest

from quire.beam_search.requests import BeamSearch, BeamSearches
from quire.engine.messages import AbortRequests, AddRequest, CoreRequest, EngineCoreRequest
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


def test_each_step_forks_every_beam_and_closes_the_parents() -> None:
    """As the core gets it, in a process of its own."""
    outputs: list[RequestOutput | Exception] = []
    searches, stats = BeamSearches(None), IterationStats()
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    first = EngineCoreRequest("r", [1, 2, 3], plain, 0.0, eos_token_ids=[0])
    params = BeamSearchParams(3, 6)
    core_ids, messages = searches.add(
        "label", TokenizedPrompt([1, 2, 3], None), first, params, outputs.append
    )
    alive: set[str] = set()
    for length in range(6):
        add, *closing = map(over_the_wire, messages)
        assert isinstance(add, AddRequest)
        requests = add.requests()
        assert [one.beam for one in requests] == list(range(len(requests)))
        assert {one.request_id for one in requests} <= {*core_ids} - alive
        for one in requests:
            assert len(one.output_token_ids) == length
            assert one.sampling_params.max_tokens == length + 1
            assert (one.fork_of in alive) == (length > 0)
        assert [one.request_ids for one in closing if isinstance(one, AbortRequests)] == (
            [sorted(alive)] if length else []
        )
        alive = {one.request_id for one in requests}
        messages = []
        for one in random.Random(length).sample(requests, len(requests)):  # they answer in any order
            entry = entry_after(one.output_token_ids)
            update = RequestUpdate(one.request_id, [entry.token_ids[0]], "length", logprobs=[entry])
            messages += searches.process([update], 1.0, stats)
        if outputs:
            break
    assert [sorted(one.request_ids) for one in messages if isinstance(one, AbortRequests)] == [sorted(alive)]
    (output,) = outputs
    assert isinstance(output, RequestOutput)
    assert len(output.outputs) == 3
    assert searches.num_unfinished == 0
    for one in output.outputs:
        assert one.cumulative_logprob == pytest.approx(score(one.token_ids, 0.0))


def test_a_beam_that_fails_ends_its_search_alone() -> None:
    outputs: dict[str, list[RequestOutput | Exception]] = {"a": [], "b": []}
    searches = BeamSearches(None)
    for name, sink in outputs.items():
        first = EngineCoreRequest(name, [1], SamplingParams(temperature=0.0), 0.0)
        searches.add(name, TokenizedPrompt([1], None), first, BeamSearchParams(2, 5), sink.append)
    failed = RequestUpdate("a.a0", [], "error", error="numbers went bad")
    (message,) = searches.process([failed], 1.0, IterationStats())
    assert isinstance(message, AbortRequests)
    assert all(name.startswith("a.") for name in message.request_ids)
    (output,) = outputs["a"]
    assert isinstance(output, RequestOutput)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "numbers went bad")
    assert (outputs["b"], searches.num_unfinished) == ([], 2)
