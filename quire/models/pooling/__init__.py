"""Models whose prompts are pooled: what a checkpoint says of that, and what stands around any model that does it."""
