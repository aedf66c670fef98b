"""Quantized checkpoints: their tensors, and codecs that decode these."""
