# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafters, and the choice of how many draft tokens a step verifies."""
