"""Models whose encoder reads a text and whose decoder writes another: prompts, languages and forced tokens."""
