"""Collective communication between the ranks of one model."""
