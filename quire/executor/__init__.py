"""Executors: who runs the worker, and where."""
