"""Batch jobs: many requests of a file, answered in this process, resumable after any end."""
