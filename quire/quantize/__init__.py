"""Writes quantised checkpoints: rounding to nearest, GPTQ and AWQ, in the layout of compressed-tensors."""
