"""Scheduling of requests onto steps; pure Python, never imports torch."""
