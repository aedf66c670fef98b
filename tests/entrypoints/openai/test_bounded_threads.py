# SPDX-License-Identifier: Apache-2.0
"""Foreign code runs within its caller's limit and delays no other caller."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.entrypoints.chat.environment import RenderBudget, RenderingThread, TimeIsUpError, make_environment
from quire.entrypoints.openai.state import MAX_THREADS, BoundedThreads
from quire.processes import collect_garbage
from tests.entrypoints.openai.fake_engine import FakeEngine, FakeTokenizer
from tests.entrypoints.openai.serving import client_for
from tests.fixtures.folded import folded

LOOP = """{%- for message in messages %}{{ message.content }}{% if message.content == 'loop' %}
{%- for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"""


_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _only_own_threads() -> None:
    """Servers of tests before may live on in this process, and their idle threads with them."""
    _of_others.clear()
    _of_others.update(bounded_threads())


def bounded_threads() -> list[threading.Thread]:
    """Return those of this test."""
    named = [thread for thread in threading.enumerate() if thread.name == "quire-bounded"]
    return [thread for thread in named if thread not in _of_others]


async def until_all_ended() -> None:
    """Those that are kept do when nobody can give them work any more."""
    async with asyncio.timeout(300):
        while bounded_threads():
            collect_garbage()
            await asyncio.sleep(0.01)


def for_ever() -> None:
    """Do what a template does that never ends."""
    budget = RenderBudget()
    while True:
        budget.spend(0, "a turn")


def for_ever_twice() -> None:
    """Lose the first interruption, as in a finalizer, whose exceptions Python prints and drops."""
    with contextlib.suppress(TimeIsUpError):
        for_ever()
    for_ever()


async def test_results_and_errors_come_back() -> None:
    threads = BoundedThreads()
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)


async def test_a_thread_is_kept_as_long_as_it_may_get_work() -> None:
    await until_all_ended()
    threads = BoundedThreads()
    used = [await threads.run(threading.get_ident) for _ in range(3)]
    assert used == [thread.ident for thread in bounded_threads()] * 3
    del threads
    await until_all_ended()


async def test_threads_keep_no_reference_to_finished_work() -> None:
    threads, argument = BoundedThreads(), Argument()
    seen = weakref.ref(argument)
    await threads.run(str, argument)
    del argument
    async with asyncio.timeout(300):
        while seen() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Argument:
    """Can be referred to weakly."""


@pytest.mark.parametrize("function", [for_ever, for_ever_twice])
async def test_call_beyond_the_time_limit_is_interrupted(function: Callable[[], None]) -> None:
    await until_all_ended()
    threads = BoundedThreads(limit_s=0.05)
    with pytest.raises(TimeoutError):
        await threads.run(function)
    await until_all_ended()
    assert await threads.run(int, "7") == 7


async def test_thread_that_returns_too_late_is_not_used_again() -> None:
    await until_all_ended()
    threads, may_end = BoundedThreads(limit_s=0.05), threading.Event()
    with pytest.raises(TimeoutError):
        await threads.run(may_end.wait)
    may_end.set()
    await until_all_ended()
    assert await threads.run(int, "7") == 7


OPERATIONS = (
    "{% for i in x %}{% endfor %}",
    "{{ x.count(1) }}",
    "{{ x + x }}",
    "{{ x | map('string') | list }}",
    "{{ x | select('odd') | list }}",
    "{{ x | rejectattr('real', 'odd') | list }}",
    "{% macro one() %}{% endmacro %}{{ one() }}",
)


@folded("source", OPERATIONS)
def test_operation_of_an_interrupted_thread_ends_it(source: str) -> None:
    template = make_environment().from_string(source)
    ends: list[str] = []

    def render() -> None:
        try:
            ends.append(template.render(x=[1, 2]))
        except TimeIsUpError as error:
            ends.append(type(error).__name__)

    for is_interrupted in (False, True):
        thread = RenderingThread(target=render)
        thread.is_interrupted = is_interrupted
        thread.start()
        thread.join()
    assert ends[1] == "TimeIsUpError" != ends[0]


async def test_abandoned_call_is_interrupted() -> None:
    await until_all_ended()
    threads = BoundedThreads()
    task = asyncio.create_task(threads.run(for_ever))
    while not bounded_threads():  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_all_ended()


async def test_only_so_many_run_at_a_time() -> None:
    threads, lock, num_running, most = BoundedThreads(), threading.Lock(), 0, 0

    def work() -> None:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        time.sleep(0.01)
        with lock:
            num_running -= 1

    await asyncio.gather(*(threads.run(work) for _ in range(4 * MAX_THREADS)))
    assert 1 <= most <= MAX_THREADS


@pytest.mark.item(16, 50)
async def test_a_template_that_loops_costs_one_request() -> None:
    answers = await answers_within(0.1, [*["loop"] * (MAX_THREADS + 1), "hello"])
    assert [answer.status_code for answer in answers] == [400] * (MAX_THREADS + 1) + [200]
    assert answers[0].json()["error"]["message"] == (
        "the chat template takes longer than 0.1 s for these messages"
    )
    await until_all_ended()


async def answers_within(limit_s: float, contents: list[str]) -> list[httpx.Response]:
    """Return the answers of a server that is closed once all have arrived."""
    async with client_for(FakeEngine(FakeTokenizer(LOOP))) as client:
        client._transport.app.state.server.renders.limit_s = limit_s  # type: ignore[attr-defined]

        async def ask(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}]}
            return await client.post("/v1/chat/completions", json=body)

        return await asyncio.gather(*map(ask, contents))


async def test_a_template_that_makes_gigabytes_costs_one_request() -> None:
    source = "{% for m in messages %}{{ m.content | center(m.content | length ** 9) }}{% endfor %}"
    async with client_for(FakeEngine(FakeTokenizer(source))) as client:

        async def ask(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}]}
            return await client.post("/v1/chat/completions", json=body)

        large, small = await asyncio.gather(ask("x" * 20), ask("x"))
    assert (large.status_code, small.status_code) == (400, 200)
    assert large.json()["error"]["message"] == (
        "the chat template refused the messages: center exceeds the output limit of chat templates"
    )


async def test_a_cancellation_that_comes_with_the_result_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost, and with it now and then the end of a server that had just been told to stop."""
    loop, handed_over = asyncio.get_running_loop(), threading.Event()
    hand_over = loop.call_soon_threadsafe

    def then_tell(*args: Any) -> None:
        hand_over(*args)
        handed_over.set()

    monkeypatch.setattr(loop, "call_soon_threadsafe", then_tell)
    task = asyncio.create_task(BoundedThreads().run(int))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert handed_over.wait(300), "the result waits for the loop, which is held up here"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
