# SPDX-License-Identifier: Apache-2.0
"""The feature that keeps texts to grammars: a text's masks depend on its own tokens, and its failures are its own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from quire.plugins import FACTORY, PluginTable
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.scheduler.output import NewRequestData
from quire.structured_output import backends, vocabulary
from quire.structured_output.backend import Grammar, GrammarBackend, GrammarError, Masks, Matcher
from quire.structured_output.store import GrammarStore
from quire.structured_output.worker.grammar import ConstrainedText, GrammarMask
from quire.structured_outputs_params import StructuredOutputsSettings
from quire.vocabulary import Vocabulary
from quire.worker.cpu import CpuTransfers
from quire.worker.input_batch import Samples
from quire.worker.sampler import Sampler, SamplerOutput
from tests.worker.harness import append_tokens, input_batch, next_samples, request, rows_of

END = 256
VOCAB = 300
"""More logits than tokens, as checkpoints have them."""
VOCABULARY = Vocabulary(
    [*(bytes([byte]) for byte in range(256)), *[b""] * (VOCAB - 256)], {"<end>": END}, (END,)
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


def store(**settings: Any) -> GrammarStore:
    made = GrammarStore(StructuredOutputsSettings(**settings))
    made.use_vocabulary(lambda: VOCABULARY)
    return made


def member(regex: str | None, output: str = "", **options: Any) -> NewRequestData:
    wanted = None if regex is None else StructuredOutputsParams(regex=regex)
    params = GREEDY.clone(structured_outputs=wanted, **options)
    return request([1, 2], params, output=output.encode(), eos_token_ids=[END])


class Bench:
    """A sampler with some requests, of which every logit is 0 but that of one favorite token."""

    def __init__(self, members: list[NewRequestData], grammars: GrammarStore | None = None) -> None:
        self.batch = input_batch()
        masks = GrammarMask(self.batch, VOCAB, grammars or store())
        self.sampler = Sampler(self.batch, VOCAB, CpuTransfers(), features=[masks])
        self.rows = rows_of(*(self._add(index, one) for index, one in enumerate(members)))

    def _add(self, index: int, one: NewRequestData) -> int:
        fields = {name: getattr(one, name) for name in one.__struct_fields__}
        row = self.batch.add(NewRequestData(**fields | {"request_id": str(index)}))
        self.sampler.add_request(row, one)
        return row

    def sample(self, favorite: str | int, samples: Samples | None = None) -> SamplerOutput:
        samples = samples or next_samples(self.batch, self.rows)
        logits = torch.zeros(len(samples.rows), VOCAB)
        logits[:, ord(favorite) if isinstance(favorite, str) else favorite] = 1.0
        return self.sampler.sample(logits, self.sampler.stage(samples)).read()

    def step(self, favorite: str | int) -> SamplerOutput:
        """Sample, and go on with what was sampled."""
        output = self.sample(favorite)
        append_tokens(self.batch, self.rows, output.token_ids)
        return output


def test_only_tokens_allowed_by_the_grammar_are_sampled() -> None:
    bench = Bench([member("ab*"), member(None), member("[0-9]+")])
    assert bench.step("b").token_ids.tolist() == [ord("a"), ord("b"), ord("0")]
    assert bench.step("b").token_ids.tolist() == [ord("b"), ord("b"), ord("0")]
    assert bench.step(END).token_ids.tolist() == [END, END, END]


def test_output_before_a_preemption_is_replayed_by_the_matcher() -> None:
    assert Bench([member("abc", "ab")]).sample("x").token_ids.tolist() == [ord("c")]
    assert Bench([member("abc", "abc")]).sample("x").token_ids.tolist() == [END]


def test_complete_text_ends_for_any_other_parameters() -> None:
    members = [
        member("a", "a", min_tokens=5, max_tokens=9),
        member("a", "a", allowed_token_ids=[7]),
        member("a", "a", logit_bias={END: -100.0}),
        member("a", "a", ignore_eos=True),
    ]
    assert Bench(members).sample("b").token_ids.tolist() == [END] * 4


def test_ignore_eos_prevents_an_end_while_the_text_may_continue() -> None:
    bench = Bench([member("ab{0,2}", ignore_eos=True)])
    taken = [bench.step(END).token_ids.tolist()[0] for _ in range(5)]
    assert bytes(taken[:3]) == b"abb"
    assert taken[3:] == [END, END]


def test_drafts_have_masks_of_their_own_and_leave_nothing_behind() -> None:
    bench = Bench([member("ab[cd]e")])
    (row,) = bench.rows.tolist()
    for drafts, favorite, wanted in [(b"ab", "d", b"abd"), (b"abce", "x", b"abce"), (b"ax", "b", b"ab")]:
        bench.batch.token_ids[row, 2 : 2 + len(drafts)] = list(drafts)
        columns = np.arange(2, 3 + len(drafts))
        output = bench.sample(favorite, Samples(np.full(len(columns), row), columns))
        assert output.failed == {}
        assert bytes(output.token_ids[: len(wanted)].tolist()) == wanted
        assert bench.sample("x").token_ids.tolist() == [ord("a")]


def test_an_end_among_drafts_is_the_end() -> None:
    bench = Bench([member("ab*")])
    (row,) = bench.rows.tolist()
    bench.batch.token_ids[row, 2:4] = [ord("a"), END]
    output = bench.sample("b", Samples(np.full(3, row), np.arange(2, 5)))
    assert output.token_ids.tolist() == [ord("a"), ord("b"), END]
    assert bench.sample("b").token_ids.tolist() == [ord("a")]


def test_request_with_an_uncompilable_grammar_fails_alone() -> None:
    bench = Bench([member("("), member("a"), member(None)])
    output = bench.sample("b")
    assert list(output.failed) == [0]
    assert "unclosed group" in output.failed[0]
    assert output.token_ids.tolist()[1:] == [ord("a"), ord("b")]


def test_a_text_that_has_left_its_grammar_fails() -> None:
    output = Bench([member("abc", "ax"), member("abc", "ab")]).sample("b")
    assert list(output.failed) == [0]
    assert "left its grammar" in output.failed[0]


def test_unreadable_vocabulary_fails_only_constrained_requests() -> None:
    grammars = GrammarStore(StructuredOutputsSettings())
    grammars.use_vocabulary(_broken)
    output = Bench([member("a"), member(None)], grammars).sample("b")
    assert list(output.failed) == [0]
    assert "cannot be compiled here" in output.failed[0]
    assert output.token_ids.tolist()[1] == ord("b")


def _broken() -> Vocabulary:
    raise OSError("no such file")


class FailingBackend(GrammarBackend):
    """Its matchers allow `a` until they fail, as their expression says: at which token, in which way."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        return FailingGrammar(str(params.regex))

    def matches_beyond(self, pattern: str, bound: str) -> bool:
        return False


class FailingGrammar(Grammar):
    def __init__(self, plan: str) -> None:
        self._plan = plan

    def new_matcher(self, *, shared: bool = True) -> Matcher:
        return FailingMatcher(self._plan, shared=shared)


class FailingMatcher(Matcher):
    def __init__(self, plan: str, *, shared: bool) -> None:
        way, number = plan.split(":")
        self._way, self._left, self._shared = way, int(number), shared

    def fill(self, masks: Masks, place: int) -> None:
        masks.set_only(place, [ord("a")])
        if self._left == 0 and (self._shared or self._way == "always"):
            raise GrammarError("too many states", exhausted=self._way != "once")

    def advance(self, token_id: int) -> bool:
        self._left -= 1
        return True

    def rollback(self, num_tokens: int) -> None:
        self._left += num_tokens

    is_complete = False
    may_end = False

    def forced_tokens(self) -> list[int]:
        return []


class SlowClock:
    """CPU time that goes on by the same amount whenever it is read."""

    def __init__(self, ms: float) -> None:
        self.now_ns = 0
        self._step_ns = int(ms * 1e6)

    def __call__(self) -> int:
        self.now_ns += self._step_ns
        return self.now_ns


@pytest.mark.parametrize(("ms", "fails"), [(4.0, False), (400.0, True)])
def test_text_that_spends_its_budget_fails_alone(
    monkeypatch: pytest.MonkeyPatch, ms: float, fails: bool
) -> None:
    """Its mask is complete nevertheless, so that ranks which do not limit time sample the same token."""
    monkeypatch.setattr("quire.structured_output.worker.grammar.time.thread_time_ns", SlowClock(ms))
    bench = Bench([member("a*", ignore_eos=True), member(None)])
    for _ in range(20):
        output = bench.step("b")
        assert output.token_ids.tolist() == [ord("a"), ord("b")]
    assert list(output.failed) == ([0] if fails else [])
    assert not fails or "more than 5 ms of CPU time" in output.failed[0]


def test_store_that_limits_no_time_has_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.structured_output.worker.grammar.time.thread_time_ns", SlowClock(1e4))
    grammars = GrammarStore(StructuredOutputsSettings(), limits_time=False)
    grammars.use_vocabulary(lambda: VOCABULARY)
    bench = Bench([member("a*", ignore_eos=True)], grammars)
    assert not any(bench.step("b").failed for _ in range(20))


AMBIGUOUS = [
    'start: e\ne: e e | e e e | "a"',
    'start: e\ne: e e | "a" | ' + " | ".join(f'"b{number}"' for number in range(1000)),
]


@pytest.mark.parametrize("grammar", AMBIGUOUS, ids=["small", "wide"])
def test_ambiguous_grammar_ends_within_its_budget(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that would take minutes of a step if nobody counted."""
    monkeypatch.setattr(vocabulary, "BURST_MS", 20.0)
    wanted = StructuredOutputsParams(grammar=grammar)
    params = GREEDY.clone(structured_outputs=wanted, ignore_eos=True)
    one = ConstrainedText(request([1, 2], params, output=b"", eos_token_ids=[END]), store(), VOCAB)
    unread: list[int] = []
    for _ in range(3000):
        filled = one.fill(Masks(1, VOCAB), 0, unread)
        if filled.failure is not None:
            break
        unread = [ord("a")]
    assert filled.failure is not None
    assert "CPU time" in filled.failure


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> GrammarStore:
    table: PluginTable[type[GrammarBackend]] = PluginTable("none", "", {"failing": FailingBackend}, FACTORY)
    monkeypatch.setattr(backends, "BACKENDS", table)
    return store(backend="failing")


def test_shared_limits_do_not_end_a_text_within_them_alone(
    failing: GrammarStore,
) -> None:
    bench = Bench([member("shared:2"), member("always:2"), member("once:1")], failing)
    assert bench.step("b").failed == {}
    assert list(bench.step("b").failed) == [2]
    assert list(bench.sample("b").failed) == [1, 2]
    assert bench.sample("b").token_ids.tolist()[0] == ord("a")


def test_draft_that_meets_a_limit_ends_no_text(failing: GrammarStore) -> None:
    """The text need not follow it, and goes on as it would without drafts."""
    bench = Bench([member("once:2")], failing)
    (row,) = bench.rows.tolist()
    bench.batch.token_ids[row, 2:4] = [ord("a"), ord("a")]
    output = bench.sample("b", Samples(np.full(3, row), np.arange(2, 5)))
    assert list(output.failed) == [2]
    assert bench.step("b").failed == {}
    assert bench.step("b").failed == {}
    assert list(bench.sample("b").failed) == [0]


def test_limit_of_the_library_is_named() -> None:
    """Rather than that the text has left its grammar."""
    wide = "|".join(f"b{number}x" for number in range(9000))
    wanted = StructuredOutputsParams(grammar="start: " + " | ".join(f'"{one}"' for one in wide.split("|")))
    params = GREEDY.clone(structured_outputs=wanted)
    bench = Bench([request([1, 2], params, output=b"", eos_token_ids=[END])])
    bench.step("b")
    (failure,) = bench.sample("b").failed.values()
    assert re.search(r"\d+ parser items at one position; the limit is 8192", failure)


def forced(bench: Bench, output: str) -> bytes:
    """Return the tokens that the grammar forces after this output of the only request."""
    known = np.array([1, 2, *output.encode()], dtype=np.int32)
    return bytes(bench.sampler.forced_tokens(int(bench.rows[0]), known))


def test_forced_tokens_are_predicted_and_change_no_mask() -> None:
    bench = Bench([member("<(?:name|number): [ab]>")])
    assert forced(bench, "") == b"<n"
    for character in "<na":
        assert bench.step(character).token_ids.tolist() == [ord(character)]
    assert forced(bench, "<na") == b"me: "
    assert forced(bench, "<na") == b"me: "
    assert bench.step("x").token_ids.tolist() == [ord("m")]
    assert bench.sample("x").token_ids.tolist() == [ord("e")]
    assert forced(bench, "<na") == b"", "it is behind that already"
    assert forced(bench, "<name: a") == b">"
    assert forced(bench, "<name: a>") == b""


def test_no_forced_tokens_without_a_grammar_or_outside_it() -> None:
    assert forced(Bench([member(None)]), "") == b""
    assert forced(Bench([member("abc")]), "x") == b""
    assert forced(Bench([member("abc")]), "abc") == b""


def test_budget_of_a_request_is_shared_by_its_texts() -> None:
    """A request's share of each step does not grow with `n`, except for a little that each sequence needs."""
    store = GrammarStore(StructuredOutputsSettings(mask_time_ms=5.0))
    params = StructuredOutputsParams(regex="a+")
    accounts = [store.budget(params, "request-1") for _ in range(4)]
    assert all(account is accounts[0] for account in accounts)
    assert store.budget(params, "request-2") is not accounts[0]
    account = accounts[0]
    assert account is not None
    for _ in range(4000):  # 4 texts, each of which takes 1.2 ms of every step, are within 5 ms together
        account.charge(1_200_000, 1)
    assert not account.is_spent
    for _ in range(4000):
        account.charge(1_400_000, 1)
    assert account.is_spent
