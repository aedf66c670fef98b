"""A Llama whose logits are divided by a temperature that its config.json names."""
