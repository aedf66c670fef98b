# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: their tensors, and codecs that decode these."""
