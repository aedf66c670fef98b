# SPDX-License-Identifier: Apache-2.0
"""Ollama's API, translated to and from chat completions."""
