"""Low-rank adapters (LoRA): what their checkpoints say, and where their weights are while they are served."""
