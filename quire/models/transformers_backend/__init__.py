# SPDX-License-Identifier: Apache-2.0
"""Backend for other causal language models of the installed transformers, on our attention, KV cache and
linear layers."""
