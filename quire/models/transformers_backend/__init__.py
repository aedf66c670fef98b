"""Any other causal language model of the installed transformers, on our attention, KV cache and matrices."""
