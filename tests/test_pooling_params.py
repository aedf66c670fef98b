# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from quire.errors import ValidationError
from quire.pooling_params import POOLING_TASKS, PoolingParams
from tests.fixtures.folded import folded

GOOD = [
    {},
    {"use_activation": False},
    {"dimensions": 1},
    *({"task": task} for task in POOLING_TASKS),
]


@folded("fields", GOOD)
def test_valid_pooling_params_survive_serialization(fields):
    params = PoolingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params
    assert msgspec.to_builtins(params) == fields


@folded(
    ("param", "value"),
    [
        ("use_activation", 1),
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 2.0),
        ("task", "encode"),
        ("task", 3),
    ],
)
def test_invalid_pooling_param_is_refused_by_name(param, value):
    with pytest.raises(ValidationError, match=f"{param} must be .*{value!r}") as caught:
        PoolingParams(**{param: value})
    assert caught.value.param == param


def test_an_instance_stays_valid():
    with pytest.raises(AttributeError):
        PoolingParams().dimensions = 0
