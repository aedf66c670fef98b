# SPDX-License-Identifier: Apache-2.0
import random

from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import check_stop
from tests.fixtures.folded import folded

EOS, STOP, OTHER = 7, 8, 9


@folded(
    ("output", "params", "expected"),
    [
        ([OTHER], {}, None),
        ([OTHER, EOS], {}, ("stop", None)),
        ([OTHER, EOS], {"ignore_eos": True}, None),
        ([OTHER, STOP], {"stop_token_ids": [STOP]}, ("stop", STOP)),
        ([OTHER, STOP], {}, None),
        ([EOS], {"ignore_eos": True, "stop_token_ids": [EOS]}, ("stop", EOS)),
        ([EOS], {"stop_token_ids": [EOS]}, ("stop", None)),
        ([EOS], {"min_tokens": 2}, None),
        ([STOP], {"min_tokens": 2, "stop_token_ids": [STOP]}, None),
        ([OTHER, EOS], {"min_tokens": 2}, ("stop", None)),
        ([OTHER] * 3, {"max_tokens": 3}, ("length", None)),
        ([OTHER] * 2, {"max_tokens": 3}, None),
        ([OTHER, OTHER, EOS], {"max_tokens": 3}, ("stop", None)),
        ([OTHER, OTHER, STOP], {"max_tokens": 3, "stop_token_ids": [STOP]}, ("stop", STOP)),
        ([OTHER] * 8, {"max_tokens": None}, ("length", None)),
        ([OTHER] * 7, {"max_tokens": None}, None),
        ([OTHER] * 8, {"max_tokens": 100, "min_tokens": 50}, ("length", None)),
        ([], {}, None),
    ],
)
def test_check_stop(output, params, expected):
    request = Request(
        request_id="r",
        prompt_token_ids=[EOS, STOP],
        sampling_params=SamplingParams(**{"max_tokens": 16, **params}),
        eos_token_ids=[EOS],
    )
    request.token_ids += output
    assert check_stop(request, max_model_len=10) == expected


@folded("seed", range(40))
def test_a_repetition_is_found_where_it_is_and_nowhere_else(seed):
    draw = random.Random(seed)
    smallest = draw.randint(0, 4)
    sizes = {"max_pattern_size": max(1, smallest + draw.randint(0, 3)), "min_pattern_size": smallest}
    detection = {**sizes, "min_count": draw.randint(2, 4)}
    params = SamplingParams(max_tokens=1000, min_tokens=draw.choice([0, 7]), repetition_detection=detection)
    request = Request(request_id="r", prompt_token_ids=[1, 1, 1, 1], sampling_params=params)
    pattern = [draw.randrange(2) for _ in range(draw.randint(1, 8))]
    for place in range(60):
        request.token_ids.append(pattern[place % len(pattern)] if draw.random() < 0.9 else draw.randrange(3))
        output = request.output_token_ids
        repeats = any(
            len(output) >= size * detection["min_count"]
            and output[-size * detection["min_count"] :] == output[-size:] * detection["min_count"]
            for size in range(max(smallest, 1), sizes["max_pattern_size"] + 1)
        )
        is_late = len(output) >= params.min_tokens
        assert check_stop(request, 10_000) == (("repetition", None) if repeats and is_late else None)
