"""Executors: they run the workers, in this process or in others."""
