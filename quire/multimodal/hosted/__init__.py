# SPDX-License-Identifier: Apache-2.0
"""Processors and encoders of images by transformers' code, for families that have none here."""
