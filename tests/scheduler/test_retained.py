# SPDX-License-Identifier: Apache-2.0
"""Requests that continue retained ones, as the beams of a search do."""

import functools
import random

import pytest

from quire.errors import ValidationError
from tests.scheduler.harness import Engine, make_config

PROMPT = list(range(13))


class Search:
    """Plays the front end of a search that chooses its beams by lot."""

    def __init__(self, engine: Engine, name: str, prompt: list[int], width: int, seed: int) -> None:
        self.engine, self.name, self.prompt, self.width = engine, name, prompt, width
        self.draw = random.Random(seed)
        self.round = self.num_parents = 0
        self.tokens: list[list[int]] = [[]]
        self.names = [self._add(0, None)]

    def _add(self, beam: int, parent: str | None) -> str:
        name = f"{self.name}.{self.round}.{beam}"
        tokens = self.tokens[beam]
        self.engine.add(
            name, self.prompt, output_token_ids=tokens, max_tokens=len(tokens) + 1, temperature=0,
            fork_of=parent, num_beams=self.width, beam=beam,
        )  # fmt: skip
        return name

    @property
    def is_answered(self) -> bool:
        return all(self.engine.requests[name].is_finished for name in self.names)

    def advance(self) -> None:
        """The next beams, each behind any of the last ones."""
        parents = [self.draw.randrange(len(self.names)) for _ in range(self.width)]
        self.tokens = [[*self.tokens[parent], self.draw.randrange(40)] for parent in parents]
        self.round, before = self.round + 1, self.names
        self.num_parents = len(set(parents))
        self.names = [self._add(beam, before[parent]) for beam, parent in enumerate(parents)]
        self.engine.abort(*before)


@functools.cache
def alone(tokens: tuple[int, ...]) -> list[int]:
    engine = Engine(make_config(num_gpu_blocks_override=20, max_num_batched_tokens=64))
    engine.add("r", tokens, max_tokens=1, temperature=0)
    engine.drain()
    return engine.tokens("r")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kinds", [("full",), ("full", "window 6"), ("full", "chunk 6"), ("state 2",)], ids=str
)
@pytest.mark.parametrize("num_blocks", [200, 40])
def test_each_beam_is_as_if_it_were_alone(kinds: tuple[str, ...], num_blocks: int, seed: int) -> None:
    """The executor checks that every token reads those before it, whatever was shared, copied, dropped or computed."""
    draw = random.Random(seed)
    config = make_config(
        max_num_seqs=draw.choice([1, 3, 8]),
        max_num_batched_tokens=draw.choice([5, 16, 64]),
        enable_prefix_caching=draw.random() < 0.5,
        scheduling_policy=draw.choice(["fcfs", "fair", "priority"]),
        num_gpu_blocks_override=num_blocks,
    )
    engine = Engine(config, len(kinds), kinds)
    searches = [Search(engine, f"s{i}", PROMPT[: 5 + 4 * i], draw.randint(1, 4), seed + i) for i in range(3)]
    for number in range(4):
        engine.add(f"other{number}", PROMPT[: number + 1], max_tokens=30, seed=number)
    for _ in range(300):
        if all(search.round == 7 and search.is_answered for search in searches):
            break
        if engine.scheduler.has_work():
            engine.step()
        for search in searches:
            if search.is_answered and search.round < 7:
                check(engine, search)
                search.advance()
    for search in searches:
        assert search.round == 7
        check(engine, search)
        engine.abort(*search.names)
    engine.drain()


def check(engine: Engine, search: Search) -> None:
    for name, tokens in zip(search.names, search.tokens, strict=True):
        assert engine.tokens(name) == alone((*search.prompt, *tokens))


def test_a_beam_computes_one_token_and_a_last_fork_copies_none() -> None:
    engine = Engine(make_config(enable_prefix_caching=False))
    search = Search(engine, "s", PROMPT, 3, 1)
    engine.step()
    for _ in range(8):
        search.advance()
        plan = engine.step()
        assert plan.total_num_scheduled_tokens == 3
        is_at_border = (len(PROMPT) + len(search.tokens[0]) - 1) % engine.config.cache.block_size == 0
        assert len(plan.block_copies) == (0 if is_at_border else 3 - search.num_parents)
    engine.abort(*search.names)
    engine.drain()


def test_a_search_keeps_its_place_in_the_order_of_arrival() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    search = Search(engine, "s", PROMPT, 2, 1)
    engine.step()
    engine.add("later", [1, 2, 3])
    for _ in range(3):
        search.advance()
        assert [list(engine.step().num_scheduled_tokens) for _ in range(2)] == [
            [name] for name in search.names
        ]
    engine.abort(*search.names)
    engine.drain()


def test_blocks_are_retained_until_the_last_fork_or_its_release() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    search = Search(engine, "s", PROMPT, 2, 3)
    engine.step()
    kept = engine.scheduler._queues.retained
    assert kept.holders == {"s.0.0"}
    search.advance()
    engine.step()
    assert "s.0.0" in kept.holders, "the second beam has not started"
    engine.step()
    assert kept.holders == set(search.names)
    engine.abort(*search.names)
    assert kept.holders == set()
    assert kept.get(search.names[0]) is None
    engine.drain()


def test_retained_blocks_delay_no_request() -> None:
    engine = Engine(make_config(num_gpu_blocks_override=17, enable_prefix_caching=False))
    search = Search(engine, "s", list(range(40)), 2, 3)
    for _ in range(3):
        engine.step()
    assert search.is_answered
    engine.add("big", range(50), max_tokens=2)
    for _ in range(6):
        engine.step()
    assert engine.requests["big"].is_finished
    search.advance()  # all of it is computed again
    while not search.is_answered:
        engine.step()
    check(engine, search)
    engine.abort(*search.names)
    engine.drain()


def test_fork_that_does_not_continue_its_parent_is_refused() -> None:
    engine = Engine()
    engine.add("a", PROMPT, max_tokens=1, num_beams=2)
    engine.step()
    with pytest.raises(ValidationError, match="is in use"):
        engine.add("a", PROMPT)
    for prompt, fields in (([9, *PROMPT], {}), (PROMPT, {"cache_salt": "x"}), (PROMPT, {"num_beams": 3})):
        with pytest.raises(ValidationError, match="is no continuation of"):
            engine.add("b", prompt, **{"fork_of": "a", "output_token_ids": [1], "num_beams": 2} | fields)
    engine.abort("a")
    engine.drain()
