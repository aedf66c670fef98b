"""Choosing the next token: one small class per feature, one ordered table of them in `sampler.py`."""

from quire.worker.sampler.sampler import NON_FINITE, Sampler, SamplerOutput, StagedRows, non_finite_rows

__all__ = ["NON_FINITE", "Sampler", "SamplerOutput", "StagedRows", "non_finite_rows"]
