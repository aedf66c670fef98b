import pytest

from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.stop import check_stop

EOS, STOP, OTHER = 7, 8, 9


@pytest.mark.parametrize(
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
