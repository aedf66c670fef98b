"""Ownership of KV cache blocks; pure Python, never imports torch."""
