# SPDX-License-Identifier: Apache-2.0
"""Writer of quantized checkpoints (round to nearest, GPTQ, AWQ) in the layout of compressed-tensors."""
