"""LoRA adapters: PEFT checkpoints, and their weights while they are served."""
