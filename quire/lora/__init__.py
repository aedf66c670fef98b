# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: PEFT checkpoints, and their weights while they are served."""
