"""Families of models: for each, how its config.json is read. Importing them loads no torch."""
