"""Embeddings and scores beside what people use for them: `python -m benchmarks.embeddings`."""
