# SPDX-License-Identifier: Apache-2.0
"""Ownership of KV cache blocks; pure Python, never imports torch."""
