# SPDX-License-Identifier: Apache-2.0
"""Constraints in xgrammar's EBNF, which is llama.cpp's GBNF with tokens."""
