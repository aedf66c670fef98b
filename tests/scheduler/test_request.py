# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from quire.engine.messages import EngineCoreRequest, request_of
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request, RequestStatus
from tests.fixtures.folded import folded


def make_request(**fields) -> Request:
    given = {"request_id": "r", "prompt_token_ids": [1, 2, 3], "sampling_params": SamplingParams(), **fields}
    return Request(**given)


MOVES = {
    "start": lambda request: request.start(1.0, 0),
    "preempt": lambda request: request.preempt(),
    "finish": lambda request: request.finish("stop"),
}
ALLOWED = {
    RequestStatus.WAITING: {"start": RequestStatus.RUNNING, "finish": RequestStatus.FINISHED},
    RequestStatus.RUNNING: {"preempt": RequestStatus.PREEMPTED, "finish": RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {"start": RequestStatus.RUNNING, "finish": RequestStatus.FINISHED},
    RequestStatus.FINISHED: {"finish": RequestStatus.FINISHED},
}


@folded("moves", list(itertools.product(MOVES, repeat=3)))
def test_only_the_allowed_edges_can_be_taken(moves):
    request = make_request()
    for move in moves:
        target = ALLOWED[request.status].get(move)
        if target is None:
            if __debug__:
                with pytest.raises(AssertionError, match="cannot become"):
                    MOVES[move](request)
            return
        MOVES[move](request)
        assert request.status is target


def test_finish_is_idempotent_and_the_first_reason_stays():
    request = make_request()
    assert request.finish("abort")
    assert not request.finish("stop")
    assert request.finish_reason == "abort"


def test_preemption_keeps_tokens_and_resets_progress():
    request = make_request()
    request.start(5.0, 2)
    request.token_ids.append(9)
    request.num_computed_tokens = 3
    request.preempt()
    assert request.num_computed_tokens == 0
    request.start(7.0, 1)
    assert (request.token_ids, request.num_computed_tokens) == ([1, 2, 3, 9], 1)
    assert (request.num_preemptions, request.num_cached_tokens, request.scheduled_ts) == (1, 2, 5.0)


def test_prompt_and_output_are_separate_and_the_list_is_copied():
    prompt = [1, 2, 3]
    request = make_request(prompt_token_ids=prompt)
    request.token_ids += [4, 5]
    assert prompt == [1, 2, 3]
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [4, 5])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 19), (5, 7), (17, 19), (100, 19)])
def test_context_bounds_computed_tokens_and_excludes_the_last(max_tokens, expected):
    request = make_request(sampling_params=SamplingParams(max_tokens=max_tokens))
    assert request.max_computed_tokens(20) == expected


def test_pooling_request_computes_its_prompt_only():
    assert make_request(pooling_params=PoolingParams()).max_computed_tokens(3) == 3


def test_core_message_fields_are_the_constructors_keywords():
    message = EngineCoreRequest("r", [1], SamplingParams(), 1.5, [2], priority=3, cache_salt="s")
    request = request_of(message)
    assert (request.arrival_time, request.eos_token_ids, request.priority) == (1.5, [2], 3)
    assert request.extra_keys.cache_salt == "s"
