"""An instance that exists is valid, and stays so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import ValidationError
from quire.sampling_params import RepetitionDetectionParams, SamplingParams, ThinkingMarkers


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_no_field_can_be_set(name: str) -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        setattr(params, name, getattr(params, name))


def test_lists_that_the_caller_goes_on_changing_are_its_own() -> None:
    stop, ids, allowed, bias = ["a"], [1], [2], {3: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=allowed, logit_bias=bias)
    for mine in (stop, ids, allowed):
        mine.append(-1)  # type: ignore[arg-type]
    bias[4] = 1e9
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a",), (1,), (2,))
    assert params.logit_bias == {3: 1.0}


def test_a_clone_differs_and_is_checked() -> None:
    params = SamplingParams(stop="a", top_k=-1, seed=-1, logprobs=True)
    assert params.clone(temperature=0.0) == params.clone(temperature=1e-9)
    assert params.clone(n=2).stop == ("a",)
    with pytest.raises(ValidationError, match="top_p must be finite"):
        params.clone(top_p=2.0)


def test_it_crosses_the_wire_unchanged() -> None:
    params = SamplingParams(
        stop=["a", "b"],
        stop_token_ids=[1, 1, 2],
        allowed_token_ids=[5],
        logit_bias={1: 2},
        bad_words=["a", "b c"],
        bad_words_token_ids=[[1, 2], [3]],
        logprob_token_ids=[4, 4, 5],
        thinking_token_budget=3,
        thinking_markers=ThinkingMarkers((1,), (2, 3)),
        repetition_detection={"max_pattern_size": 3, "min_count": 2},
        extra_args={"a": [1, None, {"b": 0.5}]},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_strings_are_bounded_in_all() -> None:
    SamplingParams(stop=["x" * 2048, "y" * 2048])
    with pytest.raises(ValidationError, match="4097 characters in all"):
        SamplingParams(stop=["x" * 2048, "y" * 2049])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[1.0]]}, "bad_words_token_ids"),
        ({"bad_words_token_ids": [[i, i] for i in range(129)]}, "bad_words"),
        ({"bad_words_token_ids": [[1] * 513]}, "bad_words"),
        ({"logprob_token_ids": []}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprob_token_ids": [1, 2], "logprobs": 1}, "logprobs"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, "repetition_detection"),
        ({"repetition_detection": {"min_pattern_size": 2}}, "repetition_detection"),
        ({"repetition_detection": 3}, "repetition_detection"),
        ({"extra_args": {"a": 2**64}}, "extra_args"),
        ({"extra_args": {1: 2}}, "extra_args"),
        ({"extra_args": {"a": print}}, "extra_args"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"skip_reading_prefix_cache": "yes"}, "skip_reading_prefix_cache"),
        ({"logits_processors": ["name"]}, "logits_processors"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_what_asks_for_nothing_is_none() -> None:
    params = SamplingParams(thinking_token_budget=-1, repetition_detection=RepetitionDetectionParams())
    assert params == SamplingParams.from_optional(top_p=None, n=1)
