"""Heads that guess what a model says by its hidden states, as they are published."""
