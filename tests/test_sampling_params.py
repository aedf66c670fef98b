"""An instance that exists is valid, and stays so."""

from __future__ import annotations

import msgspec
import pytest

from quire.errors import ValidationError
from quire.sampling_params import SamplingParams


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
        stop=["a", "b"], stop_token_ids=[1, 1, 2], allowed_token_ids=[5], logit_bias={1: 2}
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_stop_strings_are_bounded_in_all() -> None:
    SamplingParams(stop=["x" * 2048, "y" * 2048])
    with pytest.raises(ValidationError, match="4097 characters in all"):
        SamplingParams(stop=["x" * 2048, "y" * 2049])
