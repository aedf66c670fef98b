"""Towers: image encoders with their projections into the language model's stream."""
