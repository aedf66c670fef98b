"""Readers of checkpoints' quantization configs, a module for each method."""
