# SPDX-License-Identifier: Apache-2.0
"""Towers: image encoders with their projections into the language model's stream."""
