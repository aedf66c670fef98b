# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages API, translated to and from chat completions."""
