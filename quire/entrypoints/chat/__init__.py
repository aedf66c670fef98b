"""Chat: templates that turn a conversation into token ids, and parsers that find tool calls in what comes back."""
