# SPDX-License-Identifier: Apache-2.0
"""Embeddings and scores beside what people use for them: `python -m benchmarks.embeddings`."""
