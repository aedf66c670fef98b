"""Readers of config.json, by model family. Importing them does not import torch."""
