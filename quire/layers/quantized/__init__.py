"""Checkpoints whose matrices are quantised already: what their tensors are, and what these stand for."""
