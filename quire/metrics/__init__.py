"""Statistics of the running engine and where they go."""
