# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from quire.config import SchedulerConfig
from quire.errors import ConfigError
from tests.fixtures.folded import folded


@folded("weight", [0, -1, float("inf"), float("nan"), True, "2", None])
def test_weights_of_tenants_are_numbers_above_0(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"above 0, got .* for 'a'"):
        SchedulerConfig(fair_weights={"a": weight})


def test_a_prompt_threshold_needs_chunked_prefill() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 8}
    SchedulerConfig(**limits).check()
    with pytest.raises(ConfigError, match="long-prefill-token-threshold"):
        SchedulerConfig(**limits, enable_chunked_prefill=False).check()
