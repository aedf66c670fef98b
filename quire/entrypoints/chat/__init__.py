# SPDX-License-Identifier: Apache-2.0
"""Chat: templates that render a conversation to token ids, and parsers of tool calls and reasoning."""
