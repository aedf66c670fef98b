# SPDX-License-Identifier: Apache-2.0
"""Checks and benchmarks for a GPU: `python -m benchmarks.gpu.check` and `python -m benchmarks.gpu.bench`.

Invariant: both run from the source tree without an installation, offline, and make their own weights.
"""
