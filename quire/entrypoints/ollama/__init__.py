"""Ollama's API, translated to and from chat completions."""
