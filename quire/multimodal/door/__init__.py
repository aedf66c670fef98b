"""Media of requests: from bytes, URLs and arrays to files for the worker and placeholders in the prompt."""
