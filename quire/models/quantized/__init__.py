# SPDX-License-Identifier: Apache-2.0
"""Readers of checkpoints' quantization configs, a module for each method."""
