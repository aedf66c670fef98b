# SPDX-License-Identifier: Apache-2.0
"""The sampler against the plain one, and what must hold of every row whatever its neighbors."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.kernels.cpu.library import set_num_threads
from quire.sampling_extras import DryBreaker
from quire.sampling_params import SamplingParams, ThinkingMarkers
from quire.scheduler.output import NewRequestData
from quire.worker.cpu import CpuTransfers
from quire.worker.input_batch import Samples
from quire.worker.sampler import Sampler, SamplerOutput, StagedRows, clear_unusable
from quire.worker.sampler.logprobs import LogprobsMode, token_logprobs
from tests.fixtures.folded import folded
from tests.worker import sampler_oracle as oracle
from tests.worker.harness import append_tokens, input_batch, next_samples, request, rows_of

VOCAB = 17
# Numbers no sum of simple probabilities hits exactly: rounding then decides nothing.
TOP_P = [1.0, 0.012345, 0.31415926, 0.71828183, 0.97654321]
MIN_P = [0.0, 0.0123456, 0.314159, 0.87654]

tokens = st.integers(0, VOCAB - 1)
few_tokens = st.integers(0, 2)
marker = st.lists(few_tokens, min_size=1, max_size=3).map(tuple)


def lower_the_last(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[[*prompt_ids, *output_ids][-1]] -= 4.0
    return logits


def favor_the_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    new = logits.clone()
    new[prompt_ids[0]] = logits[prompt_ids[0]] + len(output_ids)
    return new


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from(TOP_P),
    top_k=st.sampled_from([0, 1, 3, VOCAB - 1, VOCAB, 2**62]),
    min_p=st.sampled_from(MIN_P),
    seed=st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 5.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.25]),
    presence_penalty=st.sampled_from([0.0, 2.0, -0.5]),
    logit_bias=st.none()
    | st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 3.0, 100.0]), max_size=4),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=3, max_size=9, unique=True),
    stop_token_ids=st.lists(tokens, max_size=1),
    max_tokens=st.none(),
    min_tokens=st.sampled_from([0, 0, 2, 100]),
    logprobs=st.none() | st.sampled_from([-1, 0, 1, 5]),
    bad_words_token_ids=st.lists(st.lists(few_tokens, min_size=1, max_size=3), max_size=4),
    thinking_token_budget=st.none() | st.integers(0, 3),
    thinking_markers=st.builds(ThinkingMarkers, marker, marker, st.none() | st.booleans()),
    logits_processors=st.lists(st.sampled_from([lower_the_last, favor_the_prompt]), max_size=1),
) | st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.3]),
    seed=st.integers(0, 9),
    max_tokens=st.none(),
    logprob_token_ids=st.lists(tokens, min_size=1, max_size=5),
    min_tokens=st.sampled_from([0, 100]),
)
llama_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_p=st.sampled_from(TOP_P),
    top_k=st.sampled_from([0, 1, 4, VOCAB]),
    min_p=st.sampled_from(MIN_P),
    seed=st.integers(0, 2**62),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repeat_last_n=st.sampled_from([-1, 0, 1, 4, 64]),
    bad_words_token_ids=st.lists(st.lists(few_tokens, min_size=1, max_size=2), max_size=2),
    logprobs=st.none() | st.sampled_from([0, 5]),
    max_tokens=st.none(),
    dry_multiplier=st.sampled_from([0.0, 0.8, 3.0]),
    dry_base=st.sampled_from([0.5, 1.0, 1.75]),
    dry_allowed_length=st.integers(0, 3),
    dry_penalty_last_n=st.sampled_from([-1, 0, 3, 64]),
    dry_breakers=st.lists(
        st.builds(DryBreaker, marker, st.lists(few_tokens, max_size=2).map(tuple)), max_size=3
    ).map(tuple),
    top_n_sigma=st.sampled_from([-1.0, 0.0, 0.3, 1.234]),
    typical_p=st.sampled_from([1.0, 0.2123, 0.7654, 0.9512]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.01234, 0.1234, 0.51]),
    dynatemp_range=st.sampled_from([0.0, 0.4, 2.0]),
    dynatemp_exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
sampling_params = sampling_params | llama_params
requests = st.builds(
    request,
    st.lists(tokens, min_size=1, max_size=6),
    sampling_params,
    output=st.lists(tokens, max_size=6) | st.lists(few_tokens, max_size=12),
    eos_token_ids=st.lists(tokens, max_size=1),
)


modes = st.sampled_from([mode.value for mode in LogprobsMode])


def random_logits(rng: random.Random, ties: bool) -> list[float]:
    """One row; with ties, only a few different values."""
    values = [float(np.float32(rng.gauss(0, 3))) for _ in range(VOCAB)]
    return [float(round(x)) for x in values] if ties else values


class Bench:
    """A sampler with some requests in it, in a given order of rows."""

    def __init__(
        self, members: list[NewRequestData], vocab_size: int = VOCAB, mode: str = "raw_logprobs"
    ) -> None:
        self.batch = input_batch(max_num_seqs=max(8, len(members)))
        self.sampler = Sampler(self.batch, vocab_size, CpuTransfers(), logprobs_mode=LogprobsMode(mode))
        for index, member in enumerate(members):
            self.add(f"r{index}", member)

    def add(self, request_id: str, member: NewRequestData) -> int:
        row = self.batch.add(renamed(member, request_id))
        self.sampler.add_request(row, member)
        return row

    def remove(self, request_id: str) -> None:
        row = self.batch.remove(request_id)
        assert row is not None
        self.sampler.remove_request(row)

    def sample(self, logits: list[list[float]], rows: list[int] | None = None) -> SamplerOutput:
        picked = rows_of(*(rows if rows is not None else range(len(logits))))
        return self.sampler.sample(torch.tensor(logits), self.stage(picked)).read()

    def stage(self, rows: NDArray[np.int64]) -> StagedRows:
        return self.sampler.stage(next_samples(self.batch, rows))


def renamed(member: NewRequestData, request_id: str) -> NewRequestData:
    fields = {name: getattr(member, name) for name in member.__struct_fields__}
    return NewRequestData(**fields | {"request_id": request_id})


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 7, "max_tokens": None} | values)


def kept_tokens(logits: list[float], sampling: SamplingParams, draws: int = 400) -> set[int]:
    """The tokens that are ever drawn."""
    seeds = [sampling.clone(seed=seed) for seed in range(draws)]
    return set(
        Bench([request([1], each) for each in seeds], len(logits)).sample([logits] * draws).token_ids.tolist()
    )


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5), st.integers(0, 2**32), st.booleans(), modes)
def test_equals_the_plain_sampler(members: list[NewRequestData], seed: int, ties: bool, mode: str) -> None:
    rng = random.Random(seed)
    logits = [random_logits(rng, ties) for _ in members]
    output = Bench(members, mode=mode).sample(logits)
    for index, (row, member) in enumerate(zip(logits, members, strict=True)):
        if max(oracle.changed_logits(row, member)) == -math.inf:
            assert "no token is left" in output.failed[index]
            continue
        chosen = output.token_ids[index]
        assert chosen == oracle.sample(row, member)
        asked = member.sampling_params
        assert (index in output.logprobs) == asked.wants_logprobs
        if asked.wants_logprobs:
            about = oracle.reported_logits(row, member, mode)
            ids, logprobs, ranks = oracle.logprobs(about, chosen, asked, mode)
            entry = output.logprobs[index]
            assert (entry.token_ids, entry.rank) == (ids, ranks[0])
            assert entry.ranks == (ranks[1:] if asked.logprob_token_ids else None)
            assert entry.logprobs == pytest.approx(logprobs, abs=1e-5)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**32), st.data())
def test_sampling_behind_drafts_equals_known_tokens(
    members: list[NewRequestData], seed: int, data: st.DataObject
) -> None:
    """Also after they turned out to be wrong, of which nothing stays."""
    rng, bench = random.Random(seed), Bench(members)
    drafts = [data.draw(st.lists(few_tokens, max_size=4)) for _ in members]
    rows, columns, known = [], [], []
    for row, (member, guess) in enumerate(zip(members, drafts, strict=True)):
        first = len(member.token_ids)
        bench.batch.token_ids[row, first : first + len(guess)] = guess
        for place in range(len(guess) + 1):
            rows.append(row)
            columns.append(first + place)
            known.append(continued(member, guess[:place]))
    logits = [random_logits(rng, ties=False) for _ in rows]
    samples = Samples(np.array(rows), np.array(columns))
    found = bench.sampler.sample(torch.tensor(logits), bench.sampler.stage(samples)).read()
    for index, member in enumerate(known):
        alone = Bench([member]).sample([logits[index]])
        assert (found.token_ids[index], found.failed.get(index)) == (alone.token_ids[0], alone.failed.get(0))
        assert found.logprobs.get(index) == alone.logprobs.get(0)
    again = [random_logits(rng, ties=False) for _ in members]
    assert bench.sample(again).token_ids.tolist() == Bench(members).sample(again).token_ids.tolist()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(request, st.lists(few_tokens, min_size=1, max_size=12), llama_params),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 2**32),
)
def test_llama_samplers_equal_the_plain_ones(members: list[NewRequestData], seed: int) -> None:
    """Over several tokens, so that what is remembered of a text is used."""
    rng, bench = random.Random(seed), Bench(members)
    rows = rows_of(*range(len(members)))
    for _ in range(6):
        logits = [random_logits(rng, ties=False) for _ in members]
        output = bench.sample(logits)
        for index, row in enumerate(logits):
            if index not in output.failed:
                assert output.token_ids[index] == oracle.sample(row, members[index])
        append_tokens(bench.batch, rows, output.token_ids)
        members = [continued(one, [int(t)]) for one, t in zip(members, output.token_ids, strict=True)]


mirostat_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**62),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    dry_multiplier=st.sampled_from([0.0, 3.0]),
    thinking_token_budget=st.sampled_from([None, 2]),
    thinking_markers=st.builds(ThinkingMarkers, marker, marker, st.booleans()),
    max_tokens=st.none(),
    mirostat=st.sampled_from([1, 2]),
    mirostat_tau=st.sampled_from([0.0, 1.2, 3.0, 5.0]),
    mirostat_eta=st.sampled_from([0.0, 0.1, 1.0]),
)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.lists(few_tokens, min_size=1, max_size=4), mirostat_params, st.integers(0, 2**32), st.integers(1, 11)
)
def test_mirostat_goes_on_by_its_tokens_alone(
    prompt: list[int], asked: SamplingParams, seed: int, num_before: int
) -> None:
    """One token after the other, behind drafts right and wrong, and after the row was lost: the same tokens."""
    rng, first = random.Random(seed), request(prompt, asked)
    logits = [random_logits(rng, ties=False) for _ in range(12)]
    member, mu = first, None
    for row in logits:
        token = oracle.sample(row, member, mu)
        mu = oracle.next_mu(row, member, mu, token)
        member = continued(member, [token])
    expected = member.token_ids[len(prompt) :]
    assert resumed(first, expected, logits, num_before) == expected
    bench, found = Bench([first]), list[int]()
    while len(found) < len(logits):
        known, depth = len(prompt) + len(found), rng.randint(0, min(4, len(logits) - len(found) - 1))
        drafts = expected[len(found) : len(found) + depth]
        if drafts and rng.random() < 0.5:
            drafts[-1] = (drafts[-1] + 1) % VOCAB
        bench.batch.token_ids[0, known : known + depth] = drafts
        samples = Samples(np.zeros(depth + 1, dtype=np.int64), known + np.arange(depth + 1))
        some = torch.tensor(logits[len(found) : len(found) + depth + 1])
        tokens = bench.sampler.sample(some, bench.sampler.stage(samples)).read().token_ids.tolist()
        num_right = next((i for i in range(depth) if drafts[i] != tokens[i]), depth)
        for token in tokens[: num_right + 1]:
            append_tokens(bench.batch, rows_of(0), np.array([token]))
        found += tokens[: num_right + 1]
    assert found == expected


def resumed(
    first: NewRequestData, output: list[int], logits: list[list[float]], num_before: int
) -> list[int]:
    """Return the tokens of a sampler that resumes a request with its first tokens and replays their logits."""
    bench = Bench([continued(first, output[:num_before])])
    start = first.num_prompt_tokens - 1
    columns = bench.sampler.columns_to_replay(0, 0, len(first.token_ids) + num_before)
    assert list(columns) == list(range(start + 1, start + 1 + num_before))
    for column in columns:
        bench.sampler.replay(torch.tensor(logits[column - start - 1 : column - start]), 0, column)
    assert not bench.sampler.replays
    tokens = output[:num_before]
    for row in logits[num_before:]:
        chosen = bench.sample([row]).token_ids
        append_tokens(bench.batch, rows_of(0), chosen)
        tokens += chosen.tolist()
    return tokens


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_tau(version: int) -> None:
    logits = [-math.log(token + 1) for token in range(200)]
    asked = params(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, seed=5)
    bench, probs, surprise = Bench([request([1], asked)], 200), oracle.probabilities(logits), 0.0
    for _ in range(60):
        chosen = bench.sample([logits]).token_ids
        append_tokens(bench.batch, rows_of(0), chosen)
        surprise -= math.log2(probs[int(chosen[0])]) / 60
    assert 2.0 < surprise < 4.5


LLAMA_SAMPLERS: list[dict[str, Any]] = [
    {"top_n_sigma": 1.0, "top_k": 40},
    {"typical_p": 0.9, "top_p": 0.95},
    {"xtc_probability": 1.0, "xtc_threshold": 0.001, "min_p": 1e-4},
    {"dynatemp_range": 0.7, "dynatemp_exponent": 1.7, "temperature": 0.9},
    {"mirostat": 1, "mirostat_tau": 7.0},
    {"mirostat": 2, "mirostat_tau": 7.0},
    {"dry_multiplier": 1.0, "repeat_last_n": 2, "repetition_penalty": 1.3, "typical_p": 0.99},
]


def test_large_rows_of_llama_samplers_are_bit_equal() -> None:
    """Their logits, alone on one thread as in company on two."""
    size = 40_009
    members = [request([1, 2, 3, 1, 2, 3], params(logprobs=5, **each)) for each in LLAMA_SAMPLERS]
    logits = torch.randn(len(members), size, generator=torch.Generator().manual_seed(3)).mul_(3)

    def outcome(places: list[int]) -> dict[int, Any]:
        bench = Bench([members[place] for place in places], size, "processed_logits")
        rows = torch.cat([logits[place : place + 1] for place in places])
        output = bench.sampler.sample(rows, bench.stage(rows_of(*range(len(places))))).read()
        return {place: (output.token_ids[i], output.logprobs[i]) for i, place in enumerate(places)}

    alone = [outcome([place])[place] for place in range(len(members))]
    set_num_threads(2)
    for places in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 0, 4], [5, 3, 1]):
        for place, found in outcome(places).items():
            assert found == alone[place]


def continued(member: NewRequestData, more: list[int]) -> NewRequestData:
    fields = {name: getattr(member, name) for name in member.__struct_fields__}
    return NewRequestData(**fields | {"token_ids": [*member.token_ids, *more]})


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.lists(requests, min_size=2, max_size=7), st.integers(0, 2**32))
def test_a_row_is_the_same_alone_and_in_any_batch(members: list[NewRequestData], seed: int) -> None:
    rng = random.Random(seed)
    logits = [random_logits(rng, ties=False) for _ in members]
    alone = [Bench([member]).sample([row]) for member, row in zip(members, logits, strict=True)]
    bench, places = Bench(members), rng.sample(range(len(members)), len(members))
    together = bench.sample([logits[place] for place in places], places)
    for index, place in enumerate(places):
        single = alone[place]
        assert together.failed.get(index) == single.failed.get(0)
        assert together.token_ids[index] == single.token_ids[0]
        assert together.logprobs.get(index) == single.logprobs.get(0)


@pytest.mark.parametrize("vocab_size", [1003, 10_007])
def test_large_rows_are_bit_equal_in_any_batch(vocab_size: int) -> None:
    """Alone on one thread as in company on two; an odd width, so that a row's alignment changes with its place."""
    sampling = [
        params(logprobs=5),
        params(top_p=0.9, logprobs=0),
        params(top_k=50, temperature=0.7, logprobs=-1),
        params(top_p=0.99999, min_p=1e-4, logprobs=3, temperature=1.7),
        SamplingParams(temperature=0, logprobs=2, repetition_penalty=1.2),
    ]
    rows = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(3)).mul_(3).tolist()
    members = [request([1, 2, 3], each) for each in sampling]
    alone = [Bench([member], vocab_size).sample([row]) for member, row in zip(members, rows, strict=True)]
    set_num_threads(2)
    for places in ([0, 1, 2, 3, 4], [4, 2, 0, 1, 3], [3, 1], [1, 0, 2]):
        together = Bench(members, vocab_size).sample([rows[place] for place in places], places)
        for index, place in enumerate(places):
            assert together.token_ids[index] == alone[place].token_ids[0]
            assert together.logprobs[index] == alone[place].logprobs[0]


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**32))
def test_history_as_generated_equals_history_as_given(members: list[NewRequestData], seed: int) -> None:
    """A resumed request, whose output comes with it, samples as one that generated it here step by step."""
    rng = random.Random(seed)
    fresh = [request(m.token_ids[: m.num_prompt_tokens], m.sampling_params) for m in members]
    bench, rows = Bench(fresh), rows_of(*range(len(members)))
    for _ in range(5):
        logits = [random_logits(rng, ties=False) for _ in members]
        append_tokens(bench.batch, rows, bench.sample(logits).token_ids)
    resumed = []
    for row, member in enumerate(fresh):
        known = bench.batch.token_ids[row, : bench.batch.num_tokens[row]].tolist()
        resumed.append(
            request(member.token_ids, member.sampling_params, output=known[member.num_prompt_tokens :])
        )
    logits = [random_logits(rng, ties=False) for _ in members]
    assert bench.sample(logits).token_ids.tolist() == Bench(resumed).sample(logits).token_ids.tolist()


@settings(derandomize=True, max_examples=15, deadline=None)
@given(requests, requests, st.integers(0, 2**32))
def test_a_reused_row_remembers_nothing(first: NewRequestData, second: NewRequestData, seed: int) -> None:
    """Also beside a row that keeps every feature at work."""
    everything = params(temperature=0.5, min_p=0.314159, top_k=2, top_p=0.9, frequency_penalty=1.0)
    logits = [random_logits(random.Random(seed), ties=True)] * 2
    bench = Bench([request([1], everything)])
    row = bench.add("first", first)
    bench.sample(logits, [0, row])
    bench.remove("first")
    assert bench.add("second", second) == row
    again, new = bench.sample(logits, [0, row]), Bench([second]).sample(logits[:1])
    assert (again.token_ids[1], again.logprobs.get(1)) == (new.token_ids[0], new.logprobs.get(0))


@folded(
    "strong",
    [
        {"temperature": 0.01},
        {"min_p": 0.99},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"logit_bias": {0: 100.0}},
        {"allowed_token_ids": [0]},
        {"repetition_penalty": 50.0},
        {"min_tokens": 9, "stop_token_ids": list(range(1, VOCAB))},
    ],
    ids=lambda strong: next(iter(strong)),
)
def test_every_setting_leaves_with_its_request(strong: dict[str, Any]) -> None:
    """A neighbor keeps the feature at work, the row's next owner does not use it."""
    bench, logits = Bench([request([0], params(**strong))]), [[0.1 * token for token in range(VOCAB)]] * 2
    plain = [request([0], params(seed=seed)) for seed in range(20)]
    row = bench.add("strong", request([0], params(**strong)))
    bench.sample(logits, [0, row])
    bench.remove("strong")
    for member in plain:
        assert bench.add("next", member) == row
        assert bench.sample(logits, [0, row]).token_ids[1] == Bench([member]).sample(logits[:1]).token_ids[0]
        bench.remove("next")


@folded(
    "sampling",
    [
        params(),
        params(temperature=0.5),
        params(top_k=4),
        params(top_p=0.71828),
        params(min_p=0.1),
        params(temperature=2.0, top_k=6, top_p=0.9, min_p=0.01, logit_bias={3: 1.0}),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_frequencies_follow_the_distribution(sampling: SamplingParams) -> None:
    draws = 4000
    logits = random_logits(random.Random(5), ties=False)
    member = request([1], sampling)
    expected = oracle.probabilities(oracle.filtered_logits(oracle.changed_logits(logits, member), member))
    bench = Bench([request([1], sampling.clone(seed=seed)) for seed in range(draws)])
    counts = np.bincount(bench.sample([logits] * draws).token_ids, minlength=VOCAB)
    likely = [token for token, p in enumerate(expected) if p * draws >= 5]
    assert all(counts[token] == 0 for token, p in enumerate(expected) if p == 0)
    statistic = sum((counts[t] - expected[t] * draws) ** 2 / (expected[t] * draws) for t in likely)
    freedom = len(likely) - 1
    # The 0.999 quantile of chi-square by the Wilson-Hilferty approximation.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def test_positions_of_one_request_are_independent_draws() -> None:
    """One seed: the tokens at successive output positions follow the distribution as well."""
    bench = Bench([request([0], params(seed=11))], vocab_size=2)
    heads = 0
    for _ in range(60):
        output = bench.sample([[0.0, 0.0]])
        append_tokens(bench.batch, rows_of(0), output.token_ids)
        heads += int(output.token_ids[0])
    assert 18 <= heads <= 42


def test_top_k_breaks_ties_by_lower_id() -> None:
    logits = [1.0, 2.0, 1.0, 2.0, 1.0, 0.0]
    assert kept_tokens(logits, params(top_k=3)) == {0, 1, 3}
    assert kept_tokens(logits, params(top_k=1)) == {1}


def test_tiny_top_p_keeps_one_token() -> None:
    assert kept_tokens([0.0, 0.5, 0.5, 0.2], params(top_p=1e-300)) == {1}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept_tokens(logits, params(top_p=0.5)) == {0, 1}
    assert kept_tokens(logits, params(top_k=2, top_p=0.5)) == {0}


@pytest.mark.parametrize("size", [63, 64, 65, 1024, 3000])
def test_top_p_deeper_than_the_first_look(size: int) -> None:
    """A flat distribution, whose mass lies beyond the first candidates."""
    logits = [0.0] * 3001
    with_mass = np.array(sorted(kept_tokens(logits, params(top_p=(size - 0.5) / 3001), draws=300)))
    assert with_mass.max() < size
    assert with_mass.max() >= size * 0.9


def test_greedy_takes_the_lowest_of_equals() -> None:
    bench = Bench([request([1], SamplingParams(temperature=0, logprobs=2))])
    output = bench.sample([[0.0, 4.0, -0.0, 4.0, *[0.0] * (VOCAB - 4)]])
    assert output.token_ids.tolist() == [1]
    assert (output.logprobs[0].token_ids, output.logprobs[0].rank) == ([1, 1, 3], 1)


def test_zero_and_minus_zero_are_equal() -> None:
    bench = Bench([request([1], SamplingParams(temperature=0, logprobs=3))], vocab_size=3)
    assert bench.sample([[-0.0, 0.0, -0.0]]).logprobs[0].token_ids == [0, 0, 1, 2]


def test_min_tokens_hides_eos_and_stop_tokens_until_then() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3], max_tokens=9)
    bench = Bench([request([1], sampling, eos_token_ids=[2])], vocab_size=5)
    chosen = []
    for _ in range(4):
        output = bench.sample([[0.0, 0.1, 5.0, 6.0, 1.0]])
        append_tokens(bench.batch, rows_of(0), output.token_ids)
        chosen += output.token_ids.tolist()
    assert chosen == [4, 4, 3, 3]


def test_logit_bias_bans_and_forces() -> None:
    ban = SamplingParams(temperature=0, logit_bias={2: -100.0})
    force = SamplingParams(temperature=0, logit_bias={0: 100.0})
    assert Bench([request([1], ban), request([1], force)], 3).sample(
        [[0.0, 1.0, 9.0]] * 2
    ).token_ids.tolist() == [1, 0]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=2.0)
    member = request([0], sampling, output=[1])
    assert Bench([member], 3).sample([[4.0, 3.0, 2.5]]).token_ids.tolist() == [2]


def test_presence_and_frequency_penalties_count_output_alone() -> None:
    logits = [[4.0, 3.5, 2.0]]
    presence = SamplingParams(temperature=0, presence_penalty=1.0)
    frequency = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert Bench([request([0, 0], presence)], 3).sample(logits).token_ids.tolist() == [0]
    assert Bench([request([2], presence, output=[0])], 3).sample(logits).token_ids.tolist() == [1]
    assert Bench([request([2], frequency, output=[0, 0, 0, 1, 1])], 3).sample(logits).token_ids.tolist() == [
        2
    ]


@example(5e-324)
@example(1.7e308)
@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.floats(5e-324, 1.7e308))
def test_extreme_repetition_penalty_makes_no_nan(penalty: float) -> None:
    sampling = params(repetition_penalty=penalty)
    output = Bench([request([0, 1, 2], sampling)], 5).sample([[0.0, 3e38, -3e38, 1.0, 2.0]])
    assert not output.failed
    assert 0 <= output.token_ids[0] < 5


def test_infinite_favor_is_a_sure_choice() -> None:
    """3e38 divided by the least number there is."""
    members = [request([1], params(seed=seed, repetition_penalty=5e-324)) for seed in range(4)]
    assert Bench(members, 4).sample([[1.0, 3e38, 0.0, 2.0]] * 4).token_ids.tolist() == [1] * 4


def test_logprobs_are_of_the_model_not_of_the_sampler() -> None:
    sampling = SamplingParams(temperature=0, logprobs=1, logit_bias={0: 50.0}, repetition_penalty=3.0)
    entry = Bench([request([1], sampling)], 3).sample([[0.0, 1.0, 2.0]]).logprobs[0]
    assert entry.token_ids == [0, 2]
    assert entry.rank == 3
    assert entry.logprobs == pytest.approx([-2.40760596, -0.40760596])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_of_minus_infinity_is_never_sampled(temperature: float) -> None:
    """A model may mask the padding of its vocabulary that way."""
    logits = random_logits(random.Random(1), ties=False)
    masked = [-math.inf if token % 3 else value for token, value in enumerate(logits)]
    asked = params(seed=1, logprobs=2).clone(temperature=temperature)
    seen = {Bench([request([1], asked.clone(seed=seed))]).sample([masked]).token_ids[0] for seed in range(20)}
    assert all(token % 3 == 0 for token in seen)
    output = Bench([request([1], asked)]).sample([masked])
    assert output.failed == {}
    assert all(math.isfinite(logprob) for logprob in output.logprobs[0].logprobs)


def test_nothing_but_minus_infinity_fails() -> None:
    output = Bench([request([1], params(seed=1))]).sample([[-math.inf] * VOCAB])
    assert output.failed == {0: "the model produced non-finite logits"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_fail_their_row_alone(bad: float) -> None:
    members = [request([1], params(seed=seed, logprobs=2)) for seed in range(3)]
    logits = [random_logits(random.Random(seed), ties=False) for seed in range(3)]
    good = Bench(members).sample(logits)
    logits[1][9] = bad
    output = Bench(members).sample(logits)
    assert output.failed == {1: "the model produced non-finite logits"}
    for row in (0, 2):
        assert output.token_ids[row] == good.token_ids[row]
        assert output.logprobs[row] == good.logprobs[row]


def test_huge_finite_logits_are_finite() -> None:
    assert not clear_unusable(torch.full((2, 64), 3e38)).any()


def test_a_request_that_excludes_every_token_fails_alone() -> None:
    sampling = params(allowed_token_ids=[3, 4], min_tokens=5, stop_token_ids=[3])
    members = [request([1], sampling, eos_token_ids=[4]), request([1], params())]
    greedy = request([1], sampling.clone(temperature=0.0), eos_token_ids=[4])
    logits = [random_logits(random.Random(1), ties=False)] * 3
    output = Bench([*members, greedy]).sample(logits)
    assert set(output.failed) == {0, 2}
    assert "no token is left" in output.failed[0]


def test_unused_features_stage_nothing() -> None:
    bench = Bench([request([1]), request([1], params(presence_penalty=2.0))])
    assert bench.stage(rows_of(0)).features == []
    assert len(bench.stage(rows_of(0, 1)).features) == 1


def test_features_that_change_logits_keep_reported_logprobs() -> None:
    """Whether or not a copy had to be made for them."""
    logits = [random_logits(random.Random(4), ties=False)] * 2
    plain = Bench([request([1], params(logprobs=3, temperature=0.0))] * 2).sample(logits)
    biased = Bench([request([1], params(logprobs=3, temperature=0.0, logit_bias={2: -100.0}))] * 2).sample(
        logits
    )
    assert plain.logprobs[0].token_ids[1:] == biased.logprobs[0].token_ids[1:]
    assert plain.logprobs[0].logprobs[1:] == biased.logprobs[0].logprobs[1:]


def test_random_request_without_a_seed_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="seed"):
        Bench([request([1], SamplingParams())])


def test_logprobs_of_the_whole_vocabulary() -> None:
    logits = torch.tensor([random_logits(random.Random(2), ties=True)])
    (entry,) = token_logprobs(logits, torch.tensor([4]), [-1]).entries()
    assert len(entry.token_ids) == VOCAB + 1
    assert sum(math.exp(x) for x in entry.logprobs[1:]) == pytest.approx(1.0)
