"""Finds the text that is least like the others."""
