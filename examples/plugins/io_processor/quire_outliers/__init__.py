# SPDX-License-Identifier: Apache-2.0
"""Finds the text that is least like the others."""
