"""Constraints in xgrammar's EBNF, which is llama.cpp's GBNF with tokens."""
