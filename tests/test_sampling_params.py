# SPDX-License-Identifier: Apache-2.0
"""An instance that exists is valid, and stays so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.errors import ValidationError
from quire.sampling_params import RepetitionDetectionParams, SamplingParams, ThinkingMarkers
from tests.fixtures.folded import folded


@folded("name", SamplingParams.__struct_fields__)
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


def test_params_cross_the_wire_unchanged() -> None:
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


@folded(
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
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"dry_multiplier": -0.1}, "dry_multiplier"),
        ({"dry_base": float("inf")}, "dry_base"),
        ({"dry_allowed_length": -1}, "dry_allowed_length"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x" * 40] * 26}, "dry_sequence_breakers"),
        ({"top_n_sigma": -1.5}, "top_n_sigma"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"xtc_threshold": -0.1}, "xtc_threshold"),
        ({"dynatemp_range": -1.0}, "dynatemp_range"),
        ({"dynatemp_exponent": float("nan")}, "dynatemp_exponent"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat_tau": -1.0}, "mirostat_tau"),
        ({"mirostat_eta": 11.0}, "mirostat_eta"),
        ({"temperature_last": 1}, "temperature_last"),
    ],
    ids=str,
)
def test_out_of_range_sampling_param_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_sampling_params_without_effect_are_none() -> None:
    params = SamplingParams(thinking_token_budget=-1, repetition_detection=RepetitionDetectionParams())
    assert params == SamplingParams.from_optional(top_p=None, n=1)


def test_temperature_zero_keeps_filters_of_the_chain_alone() -> None:
    plain = SamplingParams(temperature=0, top_k=5, top_p=0.5, mirostat=2)
    assert (plain.greedy, plain.top_k, plain.top_p, plain.mirostat, plain.needs_seed) == (
        True,
        0,
        1.0,
        0,
        False,
    )
    chain = SamplingParams(temperature=0, top_k=5, xtc_probability=0.5)
    assert (chain.greedy, chain.top_k, chain.needs_seed, chain.has_sampler_chain) == (True, 5, True, True)
    assert not SamplingParams(temperature=0, dynatemp_range=0.5).greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"top_n_sigma": 0.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.51},
        {"dry_multiplier": 1.0, "dry_base": 0.9},
        {"dry_multiplier": 1.0, "dry_penalty_last_n": 0},
        {"dynatemp_exponent": 3.0, "mirostat_tau": 1.0},
    ],
    ids=str,
)
def test_samplers_that_are_off_need_nothing(fields: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, **fields)
    assert not params.has_sampler_chain
    assert not params.uses_dry
    assert not params.needs_seed
