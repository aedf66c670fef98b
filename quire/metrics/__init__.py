"""Statistics of the running engine and their outputs."""
