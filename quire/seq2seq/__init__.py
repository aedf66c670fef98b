# SPDX-License-Identifier: Apache-2.0
"""Models whose encoder reads a text and whose decoder writes another: prompts, languages and forced tokens."""
