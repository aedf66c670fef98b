"""GGUF files (llama.cpp): config, tokenizer, chat template and weights in one file."""
