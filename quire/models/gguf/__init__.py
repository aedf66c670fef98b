# SPDX-License-Identifier: Apache-2.0
"""GGUF files (llama.cpp): config, tokenizer, chat template and weights in one file."""
