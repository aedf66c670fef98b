# SPDX-License-Identifier: Apache-2.0
"""Constraints as data: JSON schemas, their regular expressions and structural tags in normal form.

Formats of tool calls write them, and `quire.structured_output` compiles them; this package imports neither.
"""
