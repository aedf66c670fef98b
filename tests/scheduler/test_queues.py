# SPDX-License-Identifier: Apache-2.0
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import SamplingParams
from quire.scheduler.policies import RankedRequests
from quire.scheduler.request import Request


def request(number: int, rank: float) -> Request:
    made = Request(request_id=str(number), prompt_token_ids=[1], sampling_params=SamplingParams())
    made.number, made.rank = number, (rank, number)
    return made


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_requests_stay_in_rank_order_under_any_changes(events):
    ranked, expected = RankedRequests(), []
    for number, (rank, removes) in enumerate(events):
        if removes and expected:
            gone = expected.pop(number % len(expected))
            ranked.remove(gone)
        else:
            expected.append(request(number, rank))
            ranked.add(expected[-1])
        in_order = sorted(expected, key=lambda r: r.rank)
        assert (list(ranked), len(ranked)) == (in_order, len(expected))
        if expected:
            assert (ranked.first, ranked.last) == (in_order[0], in_order[-1])
