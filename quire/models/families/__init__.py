# SPDX-License-Identifier: Apache-2.0
"""Readers of config.json, by model family. Importing them does not import torch."""
