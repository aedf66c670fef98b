"""Embeddings, classes, scores and rankings: what is asked of a model that pools."""
