"""Anthropic's messages API, translated to and from chat completions."""

from quire.entrypoints.anthropic.messages import router as router
