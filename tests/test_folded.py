# SPDX-License-Identifier: Apache-2.0
"""Tests of `folded`: the cases that run, and messages of failures."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.fixtures.folded import folded


def test_folded_runs_the_product_of_its_tables() -> None:
    seen = []

    @folded("a", [1, 2])
    @folded(("b", "c"), [(3, 4), (5, 6)])
    def of(fixture: str, a: int, b: int, c: int) -> None:
        seen.append((fixture, a, b, c))

    assert list(inspect.signature(of).parameters) == ["fixture"]
    of(fixture="f")
    assert seen == [("f", 1, 3, 4), ("f", 1, 5, 6), ("f", 2, 3, 4), ("f", 2, 5, 6)]


def test_folded_failure_names_its_case_behind_others() -> None:
    @folded("value, limit", [(1, 2), (3, 2), (0, 2)])
    def of(value: int, limit: int) -> None:
        assert value < limit

    with pytest.raises(AssertionError) as failure:
        of()
    assert failure.value.__notes__ == ["in the case [3-2]"]


def test_folded_failures_are_all_reported() -> None:
    @folded("value", [1, 2, 3], ids="the {} of May".format)
    def of(value: int) -> None:
        if value != 2:
            pytest.fail("not 2")

    with pytest.raises(BaseExceptionGroup, match="2 of 3 cases failed") as failure:
        of()
    notes = [error.__notes__ for error in failure.value.exceptions]
    assert notes == [["in the case [the 1 of May]"], ["in the case [the 3 of May]"]]


def test_folded_test_is_skipped_if_all_cases_are() -> None:
    seen = []

    @folded("value", [1, 2])
    def of(value: int, least: int) -> None:
        if value < least:
            pytest.skip("too small")
        seen.append(value)

    of(least=2)
    assert seen == [2]
    with pytest.raises(pytest.skip.Exception, match="too small"):
        of(least=3)


async def test_folded_coroutine_is_awaited_for_each_case() -> None:
    seen = []

    @folded("value", [1, 2])
    async def of(value: int) -> None:
        seen.append(value)

    await of()
    assert seen == [1, 2]


@folded("value", [1, 2])
def test_folded_cases_have_folders_of_their_own(value: int, tmp_path: Path) -> None:
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text(str(value))


@folded("value", [1, pytest.param(2, marks=pytest.mark.skip(reason="has a mark")), 3])
def test_folded_case_with_a_mark_is_a_test_of_its_own(value: int) -> None:
    assert value != 2


def test_folded_arguments_must_be_those_of_the_test() -> None:
    with pytest.raises(AssertionError, match="does not take all of"):

        @folded("other", [1])
        def of(value: int) -> None:
            pass
