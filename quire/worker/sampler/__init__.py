"""Choosing the next token: one small class per feature, one ordered table of them in `sampler.py`."""

from quire.worker.sampler.sampler import (
    NON_FINITE,
    Sampled,
    Sampler,
    SamplerOutput,
    StagedRows,
    clear_unusable,
)

__all__ = ["NON_FINITE", "Sampled", "Sampler", "SamplerOutput", "StagedRows", "clear_unusable"]
