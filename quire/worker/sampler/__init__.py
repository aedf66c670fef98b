# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token: one class per feature, one ordered table of features in `sampler.py`."""

from quire.worker.sampler.sampler import (
    NON_FINITE,
    Sampled,
    Sampler,
    SamplerOutput,
    StagedRows,
    clear_unusable,
)

__all__ = ["NON_FINITE", "Sampled", "Sampler", "SamplerOutput", "StagedRows", "clear_unusable"]
