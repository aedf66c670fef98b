# SPDX-License-Identifier: Apache-2.0
"""The order of tokens as integers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.reference_sampling import ids_of, order_keys, rank_of
from tests.worker import sampler_oracle as oracle


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30))
def test_order_keys_sort_like_the_definition(values: list[float]) -> None:
    logits = torch.tensor([values])
    keys = order_keys(logits)
    ranked = ids_of(keys.topk(len(values)).values, len(values))[0].tolist()
    assert ranked == oracle.order(values)
    assert [int(rank_of(keys, torch.tensor([token]))) for token in ranked] == list(range(1, len(values) + 1))
