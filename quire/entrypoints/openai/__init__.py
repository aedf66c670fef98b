"""The OpenAI-compatible HTTP server; never imports torch."""
