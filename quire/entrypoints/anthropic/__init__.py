"""Anthropic's messages API, translated to and from chat completions."""
