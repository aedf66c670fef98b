"""Constraints in the EBNF of xgrammar, which is llama.cpp's GBNF with tokens."""
