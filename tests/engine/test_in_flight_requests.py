# SPDX-License-Identifier: Apache-2.0
"""In-flight requests of a front end: core ids are unique for ever, and found by the label of the caller."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.in_flight_requests import CoreIds
from quire.scheduler.wait_account import NUM_REMEMBERED


def test_names_are_unique_and_begin_with_the_label() -> None:
    ids = CoreIds()
    labels = ["a", "a", "a-1", "a-", "", "a"] * 20
    names = [ids.new(label) for label in labels]
    assert len(set(names)) == len(names)
    assert [name.rpartition("-")[0] for name in names] == labels


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.integers(0, 5)), max_size=20))
def test_in_flight_requests_are_added_and_not_ended(requests: list[tuple[str, int, int]]) -> None:
    """Each request has a label and some sequences, and ends when so many more have come."""
    ids, model = CoreIds(), list[tuple[int, str, list[str]]]()
    for now, (label, num_sequences, duration) in enumerate(requests):
        name = ids.new(label)
        core_ids = [f"{name}.{index}" for index in range(num_sequences)]
        ids.add(label, core_ids)
        model.append((now + duration, label, core_ids))
        for end, other, theirs in model:
            if end == now:
                ids.finish(other, theirs)
        model = [entry for entry in model if entry[0] > now]
        for one in "ab":
            expected = [core_id for _, other, theirs in model if other == one for core_id in theirs]
            assert ids.in_flight(one) == expected
            assert (one in ids) == bool(expected)
            assert not expected or ids.known(one) == expected
        assert len(ids) == len({label for _, label, _ in model})


def test_the_last_request_of_a_label_is_known_for_a_while() -> None:
    ids = CoreIds()
    for number in range(NUM_REMEMBERED + 1):
        for turn in "xy":
            ids.add(f"r{number}", [f"{number}{turn}"])
            ids.finish(f"r{number}", [f"{number}{turn}"])
    assert ids.known("r0") == []
    assert ids.known("r1") == ["1y"]
    assert ids.in_flight("r1") == []
