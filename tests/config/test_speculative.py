# SPDX-License-Identifier: Apache-2.0
"""Tests of the keys and values of `--speculative-config`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.spec_decode.drafter import check_speculation, drafter_names
from tests.fixtures.folded import folded


def made(**given: Any) -> EngineConfig:
    return EngineConfig.from_args(speculative_config=given)


@folded(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 3}, 'needs a "method"'),
        ({"method": "ngram", "num_speculative_tokens": 0}, ">= 1 - at `\\$.num_speculative_tokens`"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "<= 64"),
        ({"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": 3}, "prompt_lookup_min is 9"),
        ({"method": "ngram", "prompt_lokup_min": 9}, "unknown field `prompt_lokup_min`"),
        ({"method": 3}, "Expected `str"),
        ({"method": "recorded", "synthetic_acceptance_rate": 1.5}, "<= 1.0"),
    ],
)
def test_value_out_of_range_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "medusas"},
            "one of auto, draft_model, medusa, eagle, eagle3, mtp, ngram, suffix",
        ),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min is not used by method 'suffix'"),
        ({"method": "auto", "model": "x"}, "model is not used by method 'auto'"),
        ({"method": "draft_model", "prompt_lookup_min": 2}, "prompt_lookup_min is not used"),
        ({"method": "mtp", "model": "x"}, "model is not used by method 'mtp'"),
    ],
)
def test_option_without_effect_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_speculation(made(**given))


def test_one_length_draws_the_other_along() -> None:
    assert made(method="ngram").speculative.settings.prompt_lookup == (2, 8)
    assert made(method="ngram", prompt_lookup_max=1).speculative.settings.prompt_lookup == (1, 1)
    assert made(method="ngram", prompt_lookup_min=12).speculative.settings.prompt_lookup == (12, 12)


def test_speculation_is_off_by_default() -> None:
    config = EngineConfig.from_args()
    check_speculation(config)
    assert drafter_names(config.speculative.settings.method) == ()
