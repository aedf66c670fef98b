"""GGUF files, in which llama.cpp and its kin keep a whole model: shape, tokenizer, chat template and weights."""
