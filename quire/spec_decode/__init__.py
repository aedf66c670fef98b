"""Speculative decoding: drafters, and the choice of how many draft tokens a step verifies."""
